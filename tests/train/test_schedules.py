"""Schedules, Muon, float16 with its loss scale, and the options of compilation."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algo.config import AlgoConfig
from whet.algo.packing import TrainingSequence, pack
from whet.config import from_dict
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.inspect.diagnose.update import learning_rate_at
from whet.kernels import eager as eager_kernels
from whet.model.config import Family, ModelConfig
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.train import rl, sft
from whet.train.objective.objective import Objective
from whet.train.optim import precision, step
from whet.train.optim.optimizer import LossScale, orthogonalise
from whet.train.optim.step import (
    OptimConfig,
    Optimizer,
    Precision,
    forward_backward,
    learning_rate,
    parameter_dtype,
    prepare_model,
    warm_up_warning,
)
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import MicroBatch, UserError

FREE = OptimConfig(lr=0.01, max_grad_norm=math.inf, weight_decay=0.1)


def make_model(family: Family = "llama", dtype: torch.dtype = torch.float32) -> LanguageModel:
    shape = ModelConfig(
        family=family, vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=4 if family == "gpt2" else 2, head_dim=8, max_positions=32,
    )  # fmt: skip
    model = build_model(shape)
    init_weights(model, seed=1)
    return model.to(dtype)


def set_gradients(model: torch.nn.Module, number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for parameter in model.parameters():
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


# --- schedules ------------------------------------------------------------------------------------------------


def rates(steps: int = 101, **options: Any) -> list[float]:
    config = OptimConfig(lr=1.0, warmup_steps=0, final_lr_share=0.0, **options)
    return [learning_rate(config, number, steps) for number in range(steps)]


@pytest.mark.parametrize(
    ("warmup_steps", "num_steps", "share"),
    [(50, 5, "10%"), (5, 5, "100%"), (4, 5, ""), (0, 5, ""), (1, 1, ""), (10, 1, "10%"), (0, 1, "")],
)
def test_a_warm_up_longer_than_the_run_is_said(warmup_steps: int, num_steps: int, share: str) -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=warmup_steps)
    said = warm_up_warning(config, num_steps)
    last = learning_rate(config, num_steps - 1, num_steps)
    assert bool(said) == bool(share)
    if share:
        assert f"optim.warmup_steps = {warmup_steps} and the run has {num_steps} step" in said
        assert f"to {last:g} ({share} of optim.lr)" in said


def test_the_settings_of_an_earlier_version_are_refused_unless_they_were_idle() -> None:
    for key, gone in OptimConfig.RENAMED.items():
        name, _, value = key.partition("=")
        with pytest.raises(UserError, match=rf"config: {name}.* is gone: {gone.instead}"):
            from_dict(OptimConfig, {name: value or 7}, where="config")
        if not value:
            assert from_dict(OptimConfig, {name: gone.default}, where="config") == OptimConfig()


@pytest.mark.parametrize("schedule", step.SHAPES)
def test_the_diagnosis_knows_every_schedule(schedule: Any) -> None:
    config = OptimConfig(lr=0.3, warmup_steps=7, final_lr_share=0.2, schedule=schedule)
    for number in range(90):
        assert learning_rate_at(config, number, 90) == pytest.approx(
            learning_rate(config, number, 90), rel=1e-6
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"muon_lr": 0.02}, "read with optim.optimizer = muon"),
        ({"muon_momentum": 1.0, "optimizer": "muon"}, "expected 0 to below 1"),
        ({"compile_mode": "max-autotune"}, "read with optim.compile = true"),
    ],
)
def test_what_would_be_ignored_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**wrong)


# --- Muon -----------------------------------------------------------------------------------------------------


def hidden(model: LanguageModel) -> dict[str, torch.nn.Parameter]:
    inside = {id(p) for layer in model.layers for p in layer.parameters()}
    return {name: p for name, p in model.named_parameters() if p.dim() == 2 and id(p) in inside}


@pytest.mark.parametrize(("scale", "theirs"), [("rms", "match_rms_adamw"), ("spectral", "original")])
def test_muon_is_pytorchs_bitwise(scale: Any, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_kernels, "has_bfloat16_products", lambda: True)
    model, twin = make_model(), make_model()
    optimizer = Optimizer(
        model, replace(FREE, optimizer="muon", muon_lr=0.03, muon_momentum=0.9, muon_scale=scale)
    )
    assert optimizer.muon_names == hidden(model).keys()
    assert len(optimizer.muon_names) == 14
    matrices = hidden(twin)
    rest = [p for name, p in twin.named_parameters() if name not in matrices]
    expected = [
        torch.optim.Muon(matrices.values(), lr=0.03, weight_decay=0.1, momentum=0.9, adjust_lr_fn=theirs),
        torch.optim.AdamW(
            [{"params": [p], "weight_decay": 0.1 if p.dim() == 2 else 0.0} for p in rest],
            lr=0.01,
            betas=(0.9, 0.95),
        ),
    ]
    for number in range(4):
        for each in (model, twin):
            set_gradients(each, number)
        optimizer.step(0.01 / (number + 1))
        for part, lr in zip(expected, (0.03, 0.01), strict=True):
            for group in part.param_groups:
                group["lr"] = lr / (number + 1)
            part.step()
    for name, parameter in model.named_parameters():
        want = dict(twin.named_parameters())[name]
        if name in matrices:
            assert torch.equal(parameter, want), name
        else:
            torch.testing.assert_close(parameter, want, rtol=1e-5, atol=1e-6)  # AdamW's order of operations


def test_without_bfloat16_products_singular_values_are_as_near_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eager_kernels, "has_bfloat16_products", lambda: False)
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 60), (60, 24), (32, 32)):
        x = torch.randn(shape, generator=generator)
        found = orthogonalise(x)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        assert found.dtype == torch.float32
        values = torch.linalg.svdvals(found)
        assert 0.3 < values.min() < values.max() < 1.3  # square random matrices have singular values near 0
        core = u.T @ found @ v.T  # the same singular vectors
        assert (core - core.diag().diag()).abs().max() < 0.02


def test_gpt2s_transposed_matrices_are_scaled_by_what_they_do() -> None:
    """A Conv1D [in, out] moves like the linear layer [out, in]."""
    model = make_model("gpt2")
    optimizer = Optimizer(model, replace(FREE, weight_decay=0.0, optimizer="muon", muon_scale="spectral"))
    name = next(n for n in optimizer.muon_names if n.endswith("mlp.c_fc.weight"))
    weight = dict(model.named_parameters())[name]
    before, gradient = (
        weight.detach().clone(),
        torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)),
    )
    weight.grad = gradient.clone()
    optimizer.step(0.01)
    rows, columns = weight.shape[1], weight.shape[0]
    assert rows > columns
    expected = -0.01 * math.sqrt(rows / columns) * orthogonalise(gradient.t()).t().float()
    change = (
        weight.detach() - before
    )  # the scale of [in, out] would be a fifth smaller; bfloat16 differs by 1 %
    assert (change - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("kind", ["float32", "bfloat16_master", "float16_master"])
@pytest.mark.parametrize("bits", [32, 8])
def test_muons_state_goes_on_exactly(kind: Precision, bits: Any) -> None:
    config = replace(FREE, optimizer="muon", precision=kind, adam_bits=bits)
    model = make_model(dtype=parameter_dtype(kind))
    optimizer = Optimizer(model, config)
    for number in range(3):
        set_gradients(model, number)
        optimizer.step(0.01)
    stored = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    of_matrix = {n.rpartition("/")[2] for n in stored if "layers.0.mlp.up_proj.weight" in n}
    assert of_matrix == {"momentum", "step"} | ({"master"} if kind != "float32" else set())
    twin = make_model(dtype=parameter_dtype(kind))
    twin.load_state_dict(model.state_dict())
    resumed = Optimizer(twin, config)
    resumed.load_tensors(stored)
    for each, other in ((model, optimizer), (twin, resumed)):
        set_gradients(each, 3)
        other.step(0.005)
    for got, want in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


# --- float16 --------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_scale_is_that_of_pytorchs_scaler() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2000)
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=0.0)
    for number in range(6200):
        bad = number in (0, 1, 7, 2050)
        theirs.scale(weight.sum() * (math.inf if bad else 1.0)).backward()
        theirs.step(sgd)
        theirs.update()
        sgd.zero_grad()
        ours.update(is_finite=not bad)
        assert float(ours.value) == theirs.get_scale(), number
    assert float(ours.value) == 2.0**15  # halved four times, doubled after 2,007, 4,050 and 6,050 updates


def micro_batch() -> MicroBatch:
    sequences = [
        TrainingSequence(prompt_ids=(1, 2), completion_ids=tuple(range(3 + n, 12 + n))) for n in range(4)
    ]
    return pack(sequences, token_budget=100).micro_batches[0]


@pytest.mark.parametrize("kind", ["float16_master", "float16_autocast"])
def test_scaled_gradients_are_the_gradients(kind: Precision) -> None:
    """A gradient that float16 would lose arrives; clipping and norm are those of the unscaled one."""
    autocast = step.autocast_dtype(kind)
    found = {}
    for name, precision_of in (("float32", "float32"), (kind, kind)):
        model = make_model(dtype=parameter_dtype(precision_of)).train()
        optimizer = Optimizer(model, OptimConfig(precision=precision_of, max_grad_norm=1e-9, eps=1e-12))
        assert model.loss_scale == (65536.0 if name != "float32" else 1.0)

        def score(micro: MicroBatch, model: Any = model, name: str = name) -> Any:
            logprobs, _ = score_micro_batch(model, micro, autocast=autocast if name != "float32" else None)
            return logprobs.sum() * 1e-8, {}

        totals = forward_backward([micro_batch()], score, model)
        norm = optimizer.step(1e-3)
        found[name] = totals["loss"], norm, optimizer.tensors()
    for place in (0, 1):
        assert found[kind][place] == pytest.approx(found["float32"][place], rel=0.01)
    assert (
        found["float32"][1] < 2**-20
    )  # unscaled, nearly all of its numbers are below float16's smallest, 2^-24
    for name, tensor in found["float32"][2].items():
        if name.endswith("/exp_avg"):
            mine = found[kind][2][name]
            # The smallest tensors' scaled gradients are 2^-20 and less, where float16 has four digits of two.
            assert (mine - tensor).norm() < 0.15 * tensor.norm(), name


def test_an_overflow_leaves_the_update_out_and_halves_the_scale() -> None:
    model = make_model(dtype=torch.float16)
    optimizer = Optimizer(model, replace(FREE, precision="float16_master"))
    set_gradients(model, 0)
    optimizer.step(0.01)
    before = {
        name: tensor.clone() for name, tensor in optimizer.tensors().items() if "loss_scale" not in name
    }
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    set_gradients(model, 1)
    model.head_weight.grad[0, 0] = math.inf  # type: ignore[index]
    assert not math.isfinite(optimizer.step(0.01, loss=1.0))
    assert (optimizer.num_overflows, optimizer.loss_scale, model.loss_scale) == (1, 32768.0, 32768.0)
    assert all(torch.equal(tensor, before[n]) for n, tensor in optimizer.tensors().items() if n in before)
    assert all(torch.equal(tensor, weights[n]) for n, tensor in model.state_dict().items())
    for _ in range(15):
        model.head_weight.grad = torch.full_like(model.head_weight, math.inf)
        optimizer.step(0.01)
    assert (optimizer.num_overflows, optimizer.loss_scale) == (16, 1.0)
    model.head_weight.grad = torch.full_like(model.head_weight, math.inf)
    optimizer.step(0.01)  # nothing is left to scale back: no longer an overflow
    assert (optimizer.num_overflows, optimizer.loss_scale) == (16, 0.5)
    Optimizer(model, FREE)  # another optimizer of the same model scales nothing
    assert model.loss_scale == 1.0


def make_config(policy: PolicyConfig, folder: Path, kind: Precision, **optim: Any) -> RLConfig:
    return RLConfig(
        out=str(folder),
        policy=policy,
        rewards={"format": 1.0, "correct": 1.0},
        sampling=SamplingParams(max_new_tokens=10, top_p=0.9),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, token_budget=150, precision=kind, **optim),
        algo=AlgoConfig(uninformative="keep", entropy_coef=0.01),
        num_steps=6,
        num_prompts=4,
        group_size=4,
        save_every=3,
        preflight="warn",
    )


@pytest.mark.ci
@pytest.mark.usefixtures("few_problems")
@pytest.mark.parametrize("kind", ["float16_master", "float16_autocast"])
def test_a_run_in_float16_overflows_logs_and_resumes_exactly(
    kind: Precision, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(LossScale, "FIRST", 2.0**60)
    monkeypatch.setattr(LossScale, "BACKOFF", 2.0**-20)
    monkeypatch.setattr(LossScale, "INTERVAL", 2)
    config = make_config(tiny_policy, tmp_path / "whole", kind, optimizer="muon", schedule="linear")
    whole = rl.train(config)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["rl/overflows"] == 1
    assert rows[0]["rl/loss_scale"] == 2.0**40
    assert "rl/skipped" not in rows[0]
    assert rows[0]["rl/dropped/skipped_update"] > 0
    assert any("rl/overflows" not in row and row["rl/grad_norm"] > 0 for row in rows)
    assert rows[-1]["rl/loss_scale"] != rows[0]["rl/loss_scale"]
    assert (
        "step 1: gradients overflowed in float16, the update was left out; loss scale"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "whole" / "faults").exists()
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["sampler_vs_trainer"].startswith(
        "approx"
    )
    update = Objective.update

    def stop(self: Objective, *arguments: Any, step: int, **options: Any) -> Any:
        if step == 4:
            raise RuntimeError("stopped")
        return update(self, *arguments, step=step, **options)

    halves = replace(config, out=str(tmp_path / "halves"))
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "update", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            rl.train(halves)
    again = rl.train(halves, resume=True)
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert all(bool(parameter.isfinite().all()) for parameter in whole.model.parameters())


def test_a_gpu_without_bfloat16_refuses_it_and_auto_tries_float16(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turing = torch.device("cuda")
    monkeypatch.setattr(precision, "resolve_device", lambda name: turing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for kind in ("bfloat16_master", "bfloat16_autocast"):
        with pytest.raises(
            UserError, match=f"Tesla T4 only emulates.*use {kind.replace('bf', 'f')}, which scales"
        ):
            precision.resolve_precision(make_config(tiny_policy, tmp_path, kind))
    for kind in ("float16_master", "float16_autocast", "float32"):
        config = make_config(tiny_policy, tmp_path, kind)
        assert precision.resolve_precision(config) is config
    asked: list[torch.device] = []

    def medians(runs: Any) -> dict[str, float]:
        asked.extend(runs)
        return dict.fromkeys(runs, 1.0) | {"float16_master": 0.5}

    monkeypatch.setattr(precision, "_medians", medians)
    monkeypatch.setattr(precision, "has_bfloat16", lambda device: False)
    shape = tiny_policy.model
    assert precision.measure(shape, torch.device("cpu")).keys() == set(precision.WITHOUT_BFLOAT16)
    monkeypatch.setattr(precision, "measure", lambda shape, device: medians(precision.WITHOUT_BFLOAT16))
    chosen = precision.resolve_precision(make_config(tiny_policy, tmp_path, "auto"), lambda policy: shape)
    assert chosen.optim.precision == "float16_master"
    monkeypatch.undo()
    assert precision.has_bfloat16(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert precision.has_bfloat16(turing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert not precision.has_bfloat16(turing)


# --- compilation ----------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_options_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: seen.append(options))
    options = {"compile_mode": "max-autotune", "compile_dynamic": "auto", "compile_fullgraph": True}
    prepare_model(make_model(), OptimConfig(compile=True, **options))  # type: ignore[arg-type]
    prepare_model(make_model(), OptimConfig(compile=True, compile_backend="aot_eager"))
    assert seen[0] == {"mode": "max-autotune", "dynamic": None, "fullgraph": True, "backend": "inductor"}
    assert seen[-1] == {"dynamic": True, "fullgraph": False, "backend": "aot_eager"}
    seen.clear()
    prepare_model(make_model(), OptimConfig())
    assert not seen


@pytest.mark.ci
def test_a_missing_compiler_is_said_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="compile_backend = 'inductr': no backend of this PyTorch; expected one of"
    ):
        prepare_model(make_model(), OptimConfig(compile=True, compile_backend="inductr"))
    with pytest.raises(UserError, match="modes are inductor's"):
        prepare_model(
            make_model(), OptimConfig(compile=True, compile_backend="eager", compile_mode="max-autotune")
        )
    monkeypatch.setattr(step.toolchain, "compiler", lambda: None)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler, and there is none: install g\\+\\+"):
        prepare_model(make_model(), OptimConfig(compile=True))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    prepare_model(make_model(), OptimConfig(compile=True, compile_backend="eager"))  # needs none


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler, about itself
def test_a_compiled_backend_computes_the_same() -> None:
    """aot_eager takes the graphs apart and runs PyTorch's own operations."""
    results = []
    for config in (
        OptimConfig(),
        OptimConfig(compile=True, compile_backend="aot_eager", compile_dynamic="no"),
    ):
        model = make_model().train()
        prepare_model(model, config)
        logprobs, _ = score_micro_batch(model, micro_batch())
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.ci
@pytest.mark.usefixtures("few_problems")
def test_fine_tuning_learns_with_muon(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = SFTConfig(
        out=str(tmp_path), policy=tiny_policy, num_steps=40, batch_size=16,
        optim=OptimConfig(lr=5e-3, warmup_steps=5, optimizer="muon", schedule="linear"),
    )  # fmt: skip
    sft.train(config)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["sft/loss"] for row in rows if "sft/loss" in row]
    assert losses[-1] < 0.85 * losses[0]
