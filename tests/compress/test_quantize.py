"""whet quantize: the knapsack, GPTQ, super weights, and a run on a small trained model up to its folder."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from whet.__main__ import main
from whet.algo.packing import TrainingSequence, pack
from whet.compress.quantize import methods, quantize
from whet.compress.quantize.measure import (
    Meter,
    Pairs,
    find_super_weights,
    gather_inputs,
    matrix_errors,
    observed,
    shared_inputs,
)
from whet.compress.quantize.select import Option, knapsack, parse_budget, promoted, total
from whet.compress.quantize.study import (
    TRIED,
    Amount,
    Scope,
    Study,
    count_steps,
    expected_seconds,
    num_points,
)
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import hidden_rows
from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.quant import PackedMatrix, packed_parts, places
from whet.model.quant import quantize as quantize_all
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.tasks.base import TaskConfig, load_task
from whet.train import sft
from whet.train.data.demonstrations import sequences_of
from whet.train.optim.step import OptimConfig
from whet.types import MicroBatch, UserError

SHAPE = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
    init_std=0.2,
)
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


def make_model(shape: ModelConfig = SHAPE) -> LanguageModel:
    model = build_model(shape)
    init_weights(model, seed=1)
    return model.eval().requires_grad_(False)


def make_micros(seed: int, count: int = 6) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 61, (count, 24), generator=generator).tolist()
    sequences = [TrainingSequence(prompt_ids=tuple(row[:1]), completion_ids=tuple(row[1:])) for row in rows]
    return list(pack(sequences, token_budget=80).micro_batches)


# --- choosing -----------------------------------------------------------------------------------------------------


def make_options() -> dict[str, list[Option]]:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for number in range(6):
        size = int(torch.randint(100, 1000, (), generator=generator))
        cost = float(torch.rand((), generator=generator))
        found[f"m{number}"] = [
            Option("bf16", "", 2 * size, 0.0),
            Option("int8", "rtn", size, cost / 50),
            Option("nf4", "rtn", size // 2, cost),
            Option("nf4", "gptq", size // 2, cost * 0.7),
        ]
    return found


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_the_knapsack_finds_what_trying_everything_finds(share: float) -> None:
    options = make_options()
    low = sum(min(row.num_bytes for row in rows) for rows in options.values())
    high = sum(rows[0].num_bytes for rows in options.values())
    budget = int(low + share * (high - low))
    every = (dict(zip(options, rows, strict=True)) for rows in itertools.product(*options.values()))
    best = min(sum(o.cost for o in choice.values()) for choice in every if total(choice) <= budget)
    found = knapsack(options, budget)
    assert total(found) <= budget
    # Bytes are rounded up to 4096ths of the budget: it may miss a choice that fits to the byte.
    assert sum(option.cost for option in found.values()) <= best * 1.02
    with pytest.raises(UserError, match="even in 4 bits"):
        knapsack(options, low - 1)


def test_baselines_spend_the_same_bytes() -> None:
    options = make_options()
    low = sum(rows[2].num_bytes for rows in options.values())
    choice = promoted(options, low + 700, list(options))
    assert low < total(choice) <= low + 700
    assert choice["m0"].kind != "nf4"
    assert {row.method for row in choice.values() if row.kind == "nf4"} == {"rtn"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4.5bits", 562),
        ("50%", 900),
        ("1kB", None),
        ("2KB", 1900),
        ("2KiB", 1948),
        ("1500", 1400),
        ("1e3", None),
    ],
)
def test_budgets(text: str, found: int | None) -> None:
    if found is None:
        with pytest.raises(UserError, match="expected bytes"):
            parse_budget(text, 1000, 2000, 100)
    else:
        assert parse_budget(text, 1000, 2000, 100) == found


# --- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("width", [64, 100])  # 100: blocks of 64 cross rows
def test_gptq_and_awq_leave_smaller_errors_of_outputs(kind: methods.Kind, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, width, generator=generator)
    x = torch.randn(500, 8, generator=generator) @ torch.randn(8, width, generator=generator)
    x = (x + 0.1 * torch.randn(500, width, generator=generator)) * torch.logspace(-1, 1, width)
    inputs = methods.Inputs(x.t() @ x / 500, x.abs().mean(0))
    errors = {}
    for method in ("rtn", "gptq", "awq"):
        dense = methods.pack(weight, kind, method, inputs).dense(torch.float32)
        own = methods.activation_error(dense - weight, weight, inputs.moments)
        direct = ((x @ (dense - weight).t()).norm() / (x @ weight.t()).norm()).item()
        assert own == pytest.approx(direct, rel=1e-3)
        errors[method] = own
    assert errors["gptq"] < 0.7 * errors["rtn"]
    assert errors["awq"] < 0.95 * errors["rtn"]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_going_over_the_codes_again_leaves_a_smaller_error(
    kind: methods.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(count, 80, generator=generator) for count in (32, 300))
    x[:, 1:] += 2 * x[:, :-1]
    moments = x.t() @ x / 300
    errors = []
    for passes in (0, 1, 8):
        monkeypatch.setattr(methods, "PASSES", passes)
        dense = methods.gptq(weight, kind, moments).dense(torch.float32)
        errors.append(methods.activation_error(dense - weight, weight, moments))
    assert errors[0] > 1.02 * errors[1] > 1.02 * errors[2]


def test_awq_finds_its_scales_on_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 64, generator=generator)
    x = torch.randn(300, 64, generator=generator) * torch.logspace(-1, 1, 64)
    inputs, errors, tried = methods.Inputs(x.t() @ x / 300, x.abs().mean(0)), [], []
    real = methods.squared_outputs
    monkeypatch.setattr(methods, "squared_outputs", lambda w, m: tried.append(len(w)) or real(w, m))
    for rows in (32, 256):
        monkeypatch.setattr(methods, "SCALE_ROWS", rows)
        dense = methods.pack(weight, "nf4", "awq", inputs).dense(torch.float32)
        errors.append(real(dense - weight, inputs.moments))
    assert tried == [32] * methods.GRID + [256] * methods.GRID
    assert errors[0] < 1.03 * errors[1]


def test_gptq_by_blocks_of_columns_is_gptq_column_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks only put off the products. Float32 rounds them elsewhere, which may turn a code here and there."""
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(count, 150, generator=generator) for count in (40, 300))
    x[:, 1:] += 2 * x[:, :-1]
    moments = x.t() @ x / 300
    spots = torch.tensor([3, 700])
    errors, dense = [], []
    for block in (1, 64):
        monkeypatch.setattr(methods, "BLOCK", block)
        dense.append(methods.gptq(weight, "nf4", moments, spots=spots).dense(torch.float32))
        errors.append(methods.activation_error(dense[-1] - weight, weight, moments))
    assert float((dense[0] == dense[1]).float().mean()) > 0.98
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_gptq_keeps_super_weights() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight[3, 5] = 100.0
    moments = 0.5 + 0.5 * torch.eye(64)
    moments[5, 5] = 2.0  # the first to be rounded: an error of it would go to all others
    inputs = methods.Inputs(moments, moments.diagonal().sqrt())
    packed = methods.pack(weight, "nf4", "gptq", inputs, spots=torch.tensor([3 * 64 + 5]))
    assert packed.dense(torch.float32)[3, 5] == 100.0
    assert (packed.dense(torch.float32) - weight).abs().max() < 1.0


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gptq_rounds_what_no_token_reached_to_the_nearest_codes(kind: methods.Kind) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    inputs = methods.Inputs(torch.zeros(64, 64), torch.zeros(64))  # of an expert that was never chosen
    packed = methods.pack(weight, kind, "gptq", inputs).dense(torch.float32)
    nearest = PackedMatrix.of(weight, kind).dense(torch.float32)
    # NF4's rounds by the scales as they are stored, so some of its codes are nearer.
    assert ((packed - weight).abs() <= (nearest - weight).abs() + 1e-6).all()


def test_the_target_is_the_least_squares_answer_to_changed_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "PULL", 1.0)
    monkeypatch.setattr(methods, "DAMPING", 1e-6)
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(400, 24, generator=generator) for _ in range(2))
    y = x @ (torch.eye(24) + 0.1 * torch.randn(24, 24, generator=generator)) + 0.3 * noise
    weight = torch.randn(16, 24, generator=generator)
    found = methods.target(weight, y.t() @ y / 400, x.t() @ y / 400)
    wanted = torch.linalg.lstsq(y.double(), (x @ weight.t()).double()).solution.t()
    assert (found - wanted).abs().max() < 1e-4
    kept = methods.target(weight, y.t() @ y / 400, x.t() @ y / 400, spots=torch.tensor([5]))
    assert kept[0, 5] == weight[0, 5]
    # Where nothing before has changed there is nothing to make up for.
    assert torch.equal(methods.target(weight, x.t() @ x / 400, x.t() @ x / 400), weight)


# --- measuring ------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_pairs_are_of_the_full_and_of_the_changed_model() -> None:
    model, micros = make_model(), make_micros(0)
    groups = shared_inputs(model, micros[0])
    stem = "model.layers.1."
    assert [f"{stem}mlp.gate_proj.weight", f"{stem}mlp.up_proj.weight"] in groups
    assert [len(names) for names in groups] == [3, 1, 2, 1] * 2
    study = Study(model, micros, micros, methods=("rtn", "gptq"))
    own = {"model.layers.0.mlp.down_proj.weight": study.options["model.layers.0.mlp.down_proj.weight"][2]}
    name = f"{stem}self_attn.q_proj.weight"

    def inputs() -> torch.Tensor:
        seen: list[torch.Tensor] = []
        with observed(model, lambda n, expert, x: seen.append(x.clone()) if n == name else None):
            for micro in micros:
                hidden_rows(model, micro)
        return torch.cat(seen)

    x = inputs()
    with study.applied(own):
        y = inputs()
    assert not torch.equal(x, y)
    pairs = Pairs(model, micros)
    first = "model.layers.0.mlp.down_proj.weight"
    pairs.gather([first], 0, lambda: study.applied({}))
    pair = pairs.gather([name], 1, lambda: study.applied(own))[name]
    assert torch.allclose(pair.moments, y.t() @ y / len(y), atol=1e-5)
    assert torch.allclose(pair.cross, x.t() @ y / len(y), atol=1e-5)


@pytest.mark.ci
def test_codes_found_in_the_quantised_model_leave_less_of_an_error() -> None:
    """All layers in NF4: what the first ones do is made up for by the next ones."""
    model, micros = make_model(), make_micros(0, 40)
    study = Study(model, micros, make_micros(1, 40), methods=("rtn", "gptq"))
    first, refined = study._cheapest(study.floor), study.selected(study.floor)
    assert {row.method for row in first.values()} == {"gptq"}
    assert total(refined) == total(first)
    kls = [study.measure("", choice).divergence.kl for choice in (first, refined)]
    assert kls[1] < 0.95 * kls[0]
    assert study.selected(study.floor) is refined
    with study.applied(refined):
        assert {place.packs[0].kind for place in places(model).values()} == {"nf4"}
    assert not packed_parts(model)


@pytest.mark.ci
def test_a_pass_from_the_changed_layer_on_is_the_whole_pass() -> None:
    model, micros = make_model(), make_micros(0)
    whole, resuming = Meter(model, micros), Meter(model, micros, resumes=True)
    place = places(model)["model.layers.1.self_attn.v_proj.weight"]
    place.pack([PackedMatrix.of(place.matrices()[0], "nf4")])
    ran: list[int] = []
    inner = places(model)["model.layers.0.self_attn.v_proj.weight"].owner
    handle = inner.register_forward_hook(lambda *_: ran.append(1))
    found = resuming.compare(1)
    assert not ran
    assert found == whole.compare()
    assert found.kl > 0
    handle.remove()


@pytest.mark.ci
def test_a_large_model_is_measured_in_part_and_its_estimates_are_called_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each matrix one way is measured on less text; the others follow it by the errors of the outputs."""
    model, calibration, held_out = make_model(), make_micros(0, 24), make_micros(1, 24)
    texts = Amount.of(calibration), Amount.of(held_out)
    assert Scope.of(model, *texts, 2, 1, 1e12) == Scope()
    monkeypatch.setattr("whet.compress.quantize.study.LEAST_TOKENS", 100)
    scope = Scope.of(model, *texts, 2, 1, 1e6)
    assert not scope.is_exhaustive
    assert scope.sample == 100
    whole = Study(model, calibration, held_out, methods=("rtn", "gptq"))
    part = Study(model, calibration, held_out, sample=calibration[:4], methods=("rtn", "gptq"))
    for name, rows in part.options.items():
        by = {(row.kind, row.method): row for row in rows}
        assert [row.is_estimated for row in rows] == [False, True, False, True]
        place, own = places(model)[name], gather_inputs(model, calibration)[name][0]
        full = place.matrices()[0]
        errors = {}
        for method in ("rtn", "gptq"):
            delta = methods.pack(full, "nf4", method, own).dense(torch.float32) - full
            errors[method] = methods.activation_error(delta, full, own.moments) ** 2
        wanted = by["nf4", "rtn"].cost * errors["gptq"] / errors["rtn"]
        assert by["nf4", "gptq"].cost == pytest.approx(wanted, rel=1e-2)
        assert not any(row.is_estimated for row in whole.options[name])
        # What was estimated is not far from what is measured.
        own_ways = {(row.kind, row.method): row.cost for row in whole.options[name]}
        assert 0.3 < by["nf4", "gptq"].cost / own_ways["nf4", "gptq"] < 3
    budget = int(part.floor * 1.1)
    kls = {
        name: part.measure(name, choice).divergence.kl
        for name, choice in part.baselines(budget, (0,)).items()
    }
    kls["all"] = part.measure("all", part.all_nf4()).divergence.kl
    assert part.measure("selected", part.selected(budget)).divergence.kl < min(kls.values())
    # The other choice takes the codes that were found for this one.
    told: list[str] = []
    part._tell = lambda phase, detail=str: told.append(phase)
    floor = part.selected(part.floor)
    assert total(floor) == part.floor
    assert not told
    assert part.measure("floor", floor).divergence.kl < kls["all"]


@pytest.mark.ci
@pytest.mark.parametrize("is_exhaustive", [True, False])
def test_the_time_told_before_counts_the_work_of_the_study(
    monkeypatch: pytest.MonkeyPatch, is_exhaustive: bool
) -> None:
    """By a clock that ticks for each multiply-add of the layers' matrices and of the head."""
    model, ticks, told = make_model(), [0.0], list[str]()
    own, calibration, held_out = places(model), make_micros(0, 12), make_micros(1, 6)

    def product(owner: torch.nn.Module, given: tuple[torch.Tensor, ...], name: str) -> None:
        ticks[0] += len(given[0]) * own[name].shape.numel()

    for name, place in own.items():
        place.owner.register_forward_pre_hook(partial(product, name=name))
    real = Meter._logprobs

    def logprobs(self: Meter, hidden_MD: torch.Tensor) -> torch.Tensor:
        ticks[0] += hidden_MD.shape[0] * model.head_weight.numel()
        return real(self, hidden_MD)

    monkeypatch.setattr(Meter, "_logprobs", logprobs)
    monkeypatch.setattr("whet.compress.quantize.study.time.monotonic", lambda: ticks[0])
    scope, texts = Scope(), (Amount.of(calibration), Amount.of(held_out))
    sample = None
    if not is_exhaustive:
        sample = calibration[:2]
        scope = Scope(is_exhaustive=False, sample=Amount.of(sample).tokens, steps=(0.0, 0.2))
    count = num_points(scope.steps, 1)
    expected = expected_seconds(model, calibration[:2], *texts, ("rtn", "gptq"), scope, count)
    ticks[0], steps = 0.0, []
    study = Study(
        model,
        calibration,
        held_out,
        sample=sample,
        methods=("rtn", "gptq"),
        advance=steps.append,
        tell=lambda phase, detail=str: told.append(f"{phase}: {detail()}"),
    )
    budget = (study.floor + study.ceiling) // 2
    study.selected(budget)
    study.table(budget, (0,))
    study.front(1, scope.steps)
    # Choices that happen to be the same are measured once.
    assert 0 <= count_steps(model, calibration[0], 2, scope, 1) - sum(steps) <= 2
    assert told.count("codes found once more: 0 of 8 groups of matrices") == 1 + is_exhaustive
    assert "matrix by matrix: 0 of 14 done;   " in told
    # No super weight was there to be tried, and the errors' own two products for each kind have no clock.
    weights, read = sum(study.numbers.values()), Amount.of(sample or calibration)
    expected -= (2 * TRIED + 4) * weights * read.tokens + TRIED * model.head_weight.numel() * read.trained
    assert expected == pytest.approx(ticks[0], rel=0.15)


def test_errors_are_those_of_the_definition() -> None:
    model, micros = make_model(), make_micros(0)
    name = "model.layers.1.mlp.up_proj.weight"
    found = matrix_errors(model, micros, gather_inputs(model, micros), {}, "nf4")[name]
    seen: list[torch.Tensor] = []
    with observed(model, lambda own, _, x: seen.append(x) if own == name else None):
        for micro in micros:
            hidden_rows(model, micro)
    x, weight = torch.cat(seen), model.get_parameter(name)
    delta = PackedMatrix.of(weight, "nf4").dense(torch.float32) - weight
    assert found.weight == pytest.approx(float(delta.norm() / weight.norm()), rel=1e-5)
    assert found.activation == pytest.approx(
        float((x @ delta.t()).norm() / (x @ weight.t()).norm()), rel=1e-3
    )
    worst = (x @ delta.t()).norm(dim=-1).max() / (x @ weight.t()).norm(dim=-1).median()
    assert found.worst_token == pytest.approx(float(worst), rel=1e-4)


def test_divergence_is_that_of_the_logits() -> None:
    model, micros = make_model(), make_micros(0)
    model.num_valid_tokens = 50
    meter = Meter(model, micros)
    assert (meter.full.kl, meter.full.top1) == (0.0, 1.0)
    full = [hidden_rows(model, m) @ model.head_weight.t() for m in micros]
    quantize_all(model, "nf4")
    own = [hidden_rows(model, m) @ model.head_weight.t() for m in micros]
    p, q = (torch.cat(rows)[:, :50].log_softmax(-1) for rows in (full, own))
    kl = (p.exp() * (p - q)).sum(-1)
    found = meter.compare()
    assert found.kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.worst_kl == pytest.approx(float(kl.max()), rel=1e-3)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


def test_a_planted_super_weight_is_found_and_others_are_not() -> None:
    """One weight writes a huge activation, by which the norms then divide all other channels."""
    model, micros = make_model(), make_micros(0)
    assert find_super_weights(model, micros) == []
    down = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    up, gate = (model.get_parameter(f"model.layers.0.mlp.{name}_proj.weight") for name in ("up", "gate"))
    row, column = 11, 37
    up[column], gate[column] = 40 * up[column], 40 * gate[column]
    down[:, column] = 0.0
    down[row, column] = 60.0
    planted = down.clone()
    # What is predicted must hang on the activation: the head is fitted to the model with it.
    hidden = torch.cat([hidden_rows(model, micro) for micro in micros])
    targets = torch.cat([micro.targets_M for micro in micros])
    wanted = torch.nn.functional.one_hot(targets, 61).float() * 12
    model.head_weight.copy_(torch.linalg.lstsq(hidden, wanted).solution.t())
    found = find_super_weights(model, micros)
    assert [(one.name, one.row, one.column, one.value) for one in found] == [
        ("model.layers.0.mlp.down_proj.weight", row, column, 60.0)
    ]
    assert found[0].broken_loss > found[0].loss + 0.2
    assert torch.equal(down, planted)


def test_experts_are_stored_smaller_than_attention() -> None:
    model = make_model(from_hf(MIXTURE, where="here"))
    study = Study(model, make_micros(0), make_micros(1), methods=("rtn",))
    choice = study.selected(int(study.floor * 1.3))
    kinds = {name.split(".")[-2 if name.endswith("weight") else -1]: row.kind for name, row in choice.items()}
    assert {kinds["gate_up_proj"], kinds["down_proj"]} == {"nf4"}
    assert "nf4" not in {kinds[f"{name}_proj"] for name in "qkvo"}
    assert not packed_parts(model)
    with study.applied(choice):
        assert len(packed_parts(model)) == 2 * 4 + sum(kinds[f"{name}_proj"] == "int8" for name in "qkvo")


# --- the program ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learnt a little of its task, from the few problems that it needs."""
    from whet.recipes.models import demo_policy

    folder = tmp_path_factory.mktemp("quantize") / "sft"
    shape = ModelConfig(
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=64,
    )
    policy = replace(demo_policy(), model=shape, max_rows=64)
    config = sft.SFTConfig(
        out=str(folder),
        policy=policy,
        num_steps=30,
        batch_size=32,
        optim=OptimConfig(lr=3e-3, warmup_steps=2, token_budget=4096),
        validation_problems=0,
    )
    sft.train(config)
    return folder


@pytest.mark.usefixtures("few_problems")
@pytest.mark.ci
def test_selected_layers_beat_all_nf4_at_equal_bytes(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    config = quantize.QuantizeConfig(
        out=str(out),
        policy=PolicyConfig(init=str(trained)),
        num_calibration=16,
        num_held_out=16,
        num_problems=4,
        num_samples=2,
        sampling=SamplingParams(max_new_tokens=24),
        methods=("rtn", "gptq"),
    )
    quantize.check(config, False)
    printed = capsys.readouterr().out
    assert "it would start, and take about 0:" in printed
    assert "each way to store it measured" in printed
    assert not out.exists()
    quantize.main(config)
    content = json.loads((out / "quantize.json").read_text())
    rows = {row["name"]: row for row in content["table"]}
    wide, chosen = rows["all NF4, float32 absmax"], rows["selected"]
    assert chosen["num_bytes"] <= wide["num_bytes"]
    assert chosen["divergence"]["kl"] <= 0.5 * wide["divergence"]["kl"]
    same = rows["selected, at all NF4's bytes"]
    assert same["num_bytes"] == rows["all NF4"]["num_bytes"]
    assert same["divergence"]["kl"] < rows["all NF4"]["divergence"]["kl"]
    for seed in range(3):
        assert chosen["divergence"]["kl"] < rows[f"random, seed {seed}"]["divergence"]["kl"]
    assert set(content["pass_at_1"]) == {"full", "all NF4", "selected"}
    assert content["pass_at_1"]["full"]["pass@1"].keys() == {"mean", "low", "high"}

    stored = json.loads((out / "quantization.json").read_text())
    assert stored["kl"] == chosen["divergence"]["kl"]
    assert stored["bytes"] == content["fixed_bytes"] + chosen["num_bytes"]
    assert stored["layers"] == {row["name"].removesuffix(".weight"): row["kind"] for row in content["layers"]}
    assert {"errors.png", "front.png", "layers.csv", "quantize.html"} <= {path.name for path in out.iterdir()}
    printed = capsys.readouterr().out
    assert re.search(rf"^selected: pass@1 .* of {config.num_problems} problems$", printed, re.MULTILINE)
    # The folder is the measured model.
    policy = load_policy(PolicyConfig(init=str(out)), seed=0)
    kinds = [place.packs[0].kind if place.packs else "bf16" for place in places(policy.model).values()]
    assert kinds == [row["kind"] for row in content["layers"]]
    assert (
        sum(part.nbytes for part in packed_parts(policy.model))
        + sum(2 * row["numbers"] for row in content["layers"] if row["kind"] == "bf16")
        == chosen["num_bytes"]
    )
    with pytest.raises(UserError, match="quantised already"):
        quantize.main(replace(config, out=str(tmp_path / "again"), policy=PolicyConfig(init=str(out))))


@pytest.mark.usefixtures("few_problems")
@pytest.mark.ci
def test_what_is_ended_while_it_measures_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "Study", end)
    config = quantize.QuantizeConfig(
        out=str(tmp_path / "small"),
        policy=PolicyConfig(init=str(trained)),
        num_calibration=4,
        num_held_out=4,
        num_problems=0,
    )
    with pytest.raises(KeyboardInterrupt):
        quantize.main(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "kind", "level"),
    [
        ((), "words", 2),
        (("--task", "arithmetic"), "arithmetic", 0),
    ],
)
def test_a_run_is_measured_on_its_own_task(
    given: tuple[str, ...],
    kind: str,
    level: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task:\n  name: words\n  level: 2\n")
    assert main(["quantize", str(run), "--out", str(tmp_path / "small"), *given, "--print-config"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)["task"]
    assert (task["name"], task["level"]) == (kind, level)


def test_solutions_that_exceed_the_context_are_left_out_before_anything_is_read(tmp_path: Path) -> None:
    rows = [
        {"question": f"{n}+1=", "answer": str(n + 1), "solution": "9" * (80 if n % 2 else 1)}
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PolicyConfig(tokenizer="bytes", template="plain", model=replace(SHAPE, vocab_size=64))
    policy, task = (
        load_policy(config, seed=0),
        load_task(TaskConfig(name="jsonl", path=str(tmp_path / "rows.jsonl"))),
    )
    found = {kind: quantize._rows(policy, task, "train", 12, kind) for kind in ("own", "data")}
    assert {len(problem.solution) for problem in found["own"]} == {1, 80}  # the model's own completions fit
    assert {len(problem.solution) for problem in found["data"]} == {1}
    assert all(s.num_tokens <= 64 for problem in found["data"] for s in sequences_of(policy, problem))
