"""Learning rates, AdamW, clipping, master weights."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from whet.model import checkpointing
from whet.model.checkpointing import Recompute
from whet.model.config import ModelConfig
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.train.optim.step import (
    OptimConfig,
    Optimizer,
    Precision,
    autocast_dtype,
    forward_backward,
    learning_rate,
    prepare_model,
)
from whet.train.optim.step import parameter_dtype as dtype_of

NUM_STEPS = 50


def rates(config: OptimConfig) -> list[float]:
    return [learning_rate(config, step, NUM_STEPS) for step in range(NUM_STEPS)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 10])
def test_schedules(schedule: str, warmup_steps: int) -> None:
    config = OptimConfig(lr=0.4, schedule=schedule, warmup_steps=warmup_steps, final_lr_share=0.25)  # type: ignore[arg-type]
    got = rates(config)
    assert got[0] == pytest.approx(0.4 / max(warmup_steps, 1))
    assert min(got) > 0
    assert max(got) == got[warmup_steps] == pytest.approx(0.4)
    assert got[:warmup_steps] == pytest.approx([0.4 * (i + 1) / warmup_steps for i in range(warmup_steps)])
    rest = got[warmup_steps:]
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] == pytest.approx(0.4 if schedule == "constant" else 0.1)


def test_midpoint_of_cosine_and_linear() -> None:
    # 11 steps without warm-up: step 5 is the middle. Half of cosine and of linear is the mean of both ends; a
    # quarter differs: (1 + cos(pi / 4)) / 2.
    for schedule, quarter in (("cosine", 0.5 + math.sqrt(0.5) / 2), ("linear", 0.75)):
        config = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=0, final_lr_share=0.0)  # type: ignore[arg-type]
        assert learning_rate(config, 5, 11) == pytest.approx(0.5)
        assert learning_rate(config, 2, 9) == pytest.approx(quarter)


def test_a_run_shorter_than_its_warm_up() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=10)
    assert [learning_rate(config, step, 3) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=0), 0, 1) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"max_grad_norm": 0.0},
        {"eps": 0.0},
        {"warmup_steps": -1},
        {"token_budget": 0},
        {"final_lr_share": 1.5},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} = .*expected"):
        OptimConfig(**wrong)  # type: ignore[arg-type]


class Small(nn.Module):
    """A matrix and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(5, 7, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(7, generator=generator).to(dtype))


def set_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


CONFIG = OptimConfig(lr=0.1, beta1=0.8, beta2=0.97, eps=1e-6, weight_decay=0.2, max_grad_norm=1.5)


@pytest.mark.usefixtures("either")
def test_adamw_is_pytorchs_and_decays_matrices_only() -> None:
    model, twin = Small(), Small()
    optimizer = Optimizer(model, CONFIG)
    groups = [{"params": [twin.matrix], "weight_decay": 0.2}, {"params": [twin.vector], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.97), eps=1e-6, foreach=False)
    for step in range(8):
        lr = 0.1 / (step + 1)
        for each in (model, twin):
            set_gradients(each, step, scale=0.1 if step % 2 else 3.0)
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.5)
        for group in expected.param_groups:
            group["lr"] = lr
        expected.step()
        assert optimizer.step(lr) == pytest.approx(float(norm), rel=1e-6)
        assert all(parameter.grad is None for parameter in model.parameters())
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        # The fused kernel orders float32 operations otherwise: a few ulps of numbers of size 1, over 8 steps.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either")
def test_adamw_by_hand() -> None:
    model = Small()
    optimizer = Optimizer(model, CONFIG)
    start = model.matrix.detach().double()
    weight, first, second = start, torch.zeros_like(start), torch.zeros_like(start)
    for step in range(3):
        set_gradients(model, step, scale=0.01)  # below the clip
        assert model.matrix.grad is not None
        gradient = model.matrix.grad.double()
        optimizer.step(0.1)
        first, second = 0.8 * first + 0.2 * gradient, 0.97 * second + 0.03 * gradient**2
        mean, square = first / (1 - 0.8 ** (step + 1)), second / (1 - 0.97 ** (step + 1))
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * mean / (square.sqrt() + 1e-6)
    # Float32 against float64: 1e-7 per operation.
    torch.testing.assert_close(model.matrix.detach().double(), weight, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either")
def test_clipping_scales_the_whole_gradient() -> None:
    # Adam forgets a common factor, so clipping shows in the moments: exp_avg = (1 - beta1) * clipped gradient.
    model = Small()
    optimizer = Optimizer(model, CONFIG)
    set_gradients(model, 0, scale=10.0)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
    assert optimizer.step(0.1) == pytest.approx(norm, rel=1e-6)
    state = optimizer.tensors()
    for name, gradient in zip(("matrix", "vector"), gradients, strict=True):
        # A norm of 60 in float32, and 1e-6 added to the norm before the division.
        torch.testing.assert_close(
            state[f"{name}/exp_avg"], 0.2 * gradient * (1.5 / norm), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    model = Small(dtype)
    optimizer = Optimizer(model, CONFIG)
    set_gradients(model, 0)
    optimizer.step(0.1)
    weights = copy.deepcopy(model.state_dict())
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    set_gradients(model, 1)
    assert model.vector.grad is not None
    model.vector.grad[3] = bad
    assert not math.isfinite(optimizer.step(0.1))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.tensors().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_nothing(loss: float) -> None:
    """Its gradients may be finite: those of a term that was masked, say."""
    model = Small()
    optimizer = Optimizer(model, CONFIG)
    before = copy.deepcopy(model.state_dict())
    set_gradients(model, 0)
    assert math.isfinite(optimizer.step(0.1, loss=loss))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_without_gradient_stay() -> None:
    model = Small()
    optimizer = Optimizer(model, CONFIG)
    model.matrix.grad = torch.ones_like(model.matrix)
    before = model.vector.detach().clone()
    optimizer.step(0.1)
    assert torch.equal(model.vector, before)
    assert optimizer.step(0.1) == 0.0


def test_master_weights_keep_steps_that_bfloat16_would_lose() -> None:
    model = Small(torch.bfloat16)
    with torch.no_grad():
        model.matrix.fill_(1.0)
    optimizer = Optimizer(model, OptimConfig(eps=1e-12))
    start = optimizer.tensors()["matrix/master"].clone()
    for _ in range(1000):
        model.matrix.grad = torch.full_like(model.matrix, 0.125)
        optimizer.step(1e-5)
    # A step of 1e-5 is 1/200 of the spacing of bfloat16 below 1 (2^-8): each alone would be rounded away. With a
    # constant gradient Adam moves by lr per step, 0.01 in all. The weights start within half a spacing of theirs, which
    # is twice as wide above 1, and the result is rounded.
    assert model.matrix.dtype == torch.bfloat16
    moved = 1.0 - model.matrix.detach().float()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=0, atol=1.5 * 2**-8)
    master = optimizer.tensors()["matrix/master"]
    # A thousand float32 subtractions from a number near 1 round by 3e-8 each.
    torch.testing.assert_close(start - master, torch.full_like(master, 0.01), rtol=0, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_is_exact(dtype: torch.dtype) -> None:
    model = Small(dtype)
    optimizer = Optimizer(model, CONFIG)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step(0.1)
    stored = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert {name for name in stored if name.endswith("/master")} == (
        {"matrix/master", "vector/master"} if dtype == torch.bfloat16 else set()
    )
    twin = Small(dtype)
    twin.load_state_dict(model.state_dict())
    resumed = Optimizer(twin, CONFIG)
    resumed.load_tensors(stored)
    for step in range(3, 6):
        for each, other in ((model, optimizer), (twin, resumed)):
            set_gradients(each, step)
            other.step(0.05)
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, optimizer.tensors()[name]), name
    for got, want in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)
    # What was stored is not written to by going on.
    assert stored["matrix/step"] == 3


def test_precisions() -> None:
    table: dict[Precision, tuple[torch.dtype | None, torch.dtype]] = {
        "float32": (None, torch.float32),
        "bfloat16_autocast": (torch.bfloat16, torch.float32),
        "bfloat16_master": (None, torch.bfloat16),
        "float16_autocast": (torch.float16, torch.float32),
        "float16_master": (None, torch.float16),
    }
    for precision, expected in table.items():
        assert (autocast_dtype(precision), dtype_of(precision)) == expected


def test_forward_backward_adds_up() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    shares = iter([(weight * 3, {"a": 1.0, "gap_max": -5.0}), (weight * 4, {"a": 2.5, "gap_max": -7.0})])
    micros: Any = [SimpleNamespace(is_counted=True), SimpleNamespace(is_counted=True)]
    totals = forward_backward(micros, lambda micro: next(shares))
    assert totals == {"loss": 14.0, "a": 3.5, "gap_max": -5.0}
    assert weight.grad == 7.0
    assert forward_backward([], lambda micro: next(shares)) == {"loss": 0.0}


def recomputing(
    family: str, kind: str | None, *, offload: bool = False
) -> tuple[LanguageModel, Counter[str]]:
    """Return a model of four layers, and how often its parts begin."""
    shape = ModelConfig(vocab_size=48, hidden_size=32, intermediate_size=64, num_layers=4, head_dim=8)
    model = build_model(replace(shape, family=family, num_kv_heads=4, num_heads=4))  # type: ignore[arg-type]
    init_weights(model, 0)
    begun: Counter[str] = Counter()
    for index, layer in enumerate(model.layers):
        for name, part in layer.named_children():
            if "norm" not in name and "ln" not in name:
                what = f"{index} {'mlp' if name == 'mlp' else 'attention'}"
                part.register_forward_pre_hook(lambda *_, what=what: begun.update([what]))
    if kind is not None:
        prepare_model(model, OptimConfig(checkpoint_layers=True, checkpoint_kind=kind))  # type: ignore[arg-type]
        model.recompute = Recompute(kind, offload=offload)  # type: ignore[arg-type]
    return model, begun


@pytest.mark.some(10)
@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["layer", "mlp", "alternate", "offload"])
def test_recomputed_layers_give_the_same_gradient(kind: str, family: str, autocast: bool) -> None:
    plain, _ = recomputing(family, None)
    model, begun = recomputing(family, "layer" if kind == "offload" else kind, offload=kind == "offload")
    tokens = torch.arange(36).view(3, 12)
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = each.logits(tokens).float()
        if each is model:
            assert set(begun.values()) == {1}
        out.square().sum().backward()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert left.grad is not None
        assert torch.equal(left.grad, right.grad)  # type: ignore[arg-type]
    again = {name for name, count in begun.items() if count == 2}
    wanted = {
        "mlp": {f"{index} mlp" for index in range(4)},
        "alternate": {f"{index} {part}" for index in (1, 3) for part in ("mlp", "attention")},
    }
    assert again == wanted.get(kind, set(begun))
    begun.clear()
    with torch.no_grad():
        model.logits(tokens)
    assert set(begun.values()) == {1}


def test_recomputing_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import would fail: it takes 3 s and 100 MB
    model, begun = recomputing("llama", "layer")
    model.logits(torch.arange(8).view(1, 8)).sum().backward()
    assert set(begun.values()) == {2}


def test_inputs_in_host_memory_are_here_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[int] = []
    made: list[checkpointing._Kept] = []

    class Watched(checkpointing._Kept):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)
            here.append(count())

        def fetch(self) -> torch.Tensor:
            found = super().fetch()
            here.append(count() + 1)  # what is fetched is the caller's
            return found

    def count() -> int:
        return sum(kept._here is not None for kept in made)

    monkeypatch.setattr(checkpointing, "_Kept", Watched)
    model, _ = recomputing("llama", "layer", offload=True)
    for _ in range(2):
        model.logits(torch.arange(24).view(2, 12)).sum().backward()
        assert here == [1, 1, 1, 1, 2, 2, 2, 1]
        here.clear()
        made.clear()
    first = model.logits(torch.arange(24).view(2, 12)).sum()
    here.clear()
    second = model.logits(torch.arange(24).view(2, 12)).sum()
    assert here == [2, 2, 2, 2]  # the last of each: two passes are not one
    del first, second
    here.clear()
    made.clear()
    copied = copy.deepcopy(model)  # as a reference is made
    copied.logits(torch.arange(24).view(2, 12)).sum().backward()
    assert here == [1, 1, 1, 1, 2, 2, 2, 1]


@pytest.mark.gpu
def test_inputs_in_host_memory_give_the_same_gradient_on_a_gpu() -> None:
    tokens = torch.arange(4096, device="cuda").view(16, 256) % 48
    gradients, peaks = [], []
    for offload in (False, True):
        model = recomputing("llama", "layer", offload=offload)[0].cuda()
        for _ in range(3):  # memory is used again
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            model.logits(tokens).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        gradients.append([p.grad for p in model.parameters()])
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right)  # attention's backward pass may add in any order
    assert peaks[1] < peaks[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
def test_compiled_layers_compute_the_same() -> None:
    config = ModelConfig(vocab_size=48, hidden_size=32, intermediate_size=64, num_layers=2, head_dim=8)
    plain, compiled = build_model(config), build_model(config)
    init_weights(plain, 0)
    compiled.load_state_dict(plain.state_dict())
    prepare_model(compiled, OptimConfig(compile=True, checkpoint_layers=True))
    tokens = torch.arange(24).view(2, 12)
    expected, got = plain.logits(tokens), compiled.logits(tokens)
    # Fused kernels may round differently in the last place of float32.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    got.square().sum().backward()
    for left, right in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-4)
    assert any(
        hasattr(part, "_compiled_call_impl") and part._compiled_call_impl for part in compiled.modules()
    )
