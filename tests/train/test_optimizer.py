"""8-bit moments, updates inside the backward pass, and state in host memory: each against the plain optimizer."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from whet.model.config import ModelConfig
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.train import adam8bit
from whet.train.adam8bit import BLOCK, Moments, decode, dynamic_code, encode
from whet.train.step import OptimConfig, Optimizer, prepare_model
from whet.types import UserError

CPU = torch.device("cpu")
SHAPE = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
)
FREE = OptimConfig(lr=3e-3, warmup_steps=0, weight_decay=0.1, max_grad_norm=math.inf)


def make(
    dtype: torch.dtype = torch.float32, shape: ModelConfig = SHAPE, device: str = "cpu"
) -> LanguageModel:
    model = build_model(shape)
    init_weights(model, 0)
    return model.to(device, dtype)


def progressions(step: int, device: str = "cpu") -> torch.Tensor:
    """Rows start, start + d, ... modulo 61: the rule is learned in a few hundred steps."""
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(1, 8, (16, 1), generator=generator) for _ in range(2))
    return ((start * 7 + stride * torch.arange(20)) % 61).to(device)


def loss_of(model: LanguageModel, step: int) -> torch.Tensor:
    tokens = progressions(step, model.head_weight.device.type)
    logits = model.logits(tokens)
    return F.cross_entropy(logits[:, 2:-1].flatten(0, 1).float(), tokens[:, 3:].flatten())


def train(model: LanguageModel, optimizer: Optimizer, steps: range, lr: float = 3e-3) -> list[float]:
    losses = []
    for step in steps:
        optimizer.begin(lr)
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step(lr, loss=losses[-1])
    return losses


def weights(model: LanguageModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().float().cpu() for parameter in model.parameters()])


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_byte_has_256_values_as_dense_as_the_paper_says(is_signed: bool) -> None:
    code = dynamic_code(is_signed=is_signed, device=CPU).double()
    assert code.shape == (256,)
    assert (code.diff() > 0).all()
    assert (code == 0).sum() == 1
    assert (code.min(), code.max()) == (-1 if is_signed else 0, 1)
    for decade in range(7):
        low = 10.0 ** (decade - 7)
        inside = code[(code > 1.0001 * low) & (code < 9.9999 * low)]
        # Section 2.2: each decade spends one bit less on its exponent, so it has twice as many fractions as the last.
        assert len(inside) == 2 ** (decade + (not is_signed))
        if len(inside) > 1:
            torch.testing.assert_close(inside.diff(), torch.full_like(inside[1:], 9 * low / len(inside)))


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("count", [1, BLOCK, 3 * BLOCK + 17])
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(is_signed: bool, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 1, (count,), generator=generator)
    x = x if is_signed else x.abs()
    code, rounds = dynamic_code(is_signed=is_signed, device=CPU), 400
    mean = torch.zeros(count, dtype=torch.float64)
    scale = F.pad(x.abs(), (0, -count % BLOCK)).view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)[:count]
    place = torch.searchsorted(code, x / scale, right=True).clamp(1, 255)
    gap = (code[place] - code[place - 1]) * scale
    for _ in range(rounds):
        codes, scales = encode(x, code, generator)
        assert codes.dtype == torch.uint8
        assert scales.shape == (-(-count // BLOCK),)
        got = decode(codes, scales, code)
        # A value at a code may be a float32 rounding of x / scale away from it.
        assert ((got - x).abs() <= gap * (1 + 1e-4) + 1e-6 * scale).all()
        mean += got.double() / rounds
    # A coin between two neighbours deviates by at most half a gap; five standard errors.
    assert ((mean - x).abs() <= 5 * 0.5 * gap / math.sqrt(rounds) + 1e-6 * scale).all()


def test_what_is_above_zero_stays_above_zero() -> None:
    code = dynamic_code(is_signed=False, device=CPU)
    x = torch.zeros(BLOCK)
    x[:3] = torch.tensor([1.0, 1e-9, 1e-30])
    got = decode(*encode(x, code, torch.Generator().manual_seed(0)), code)
    assert (got[:3] > 0).all()  # a root of 0 below a moment above 0 would be a step of lr * moment / eps
    assert (got[3:] == 0).all()
    assert (decode(*encode(torch.zeros(5), code, torch.Generator()), code) == 0).all()


def test_a_slow_decay_is_not_rounded_away() -> None:
    # 0.999 a step is a tenth of the gap between codes: rounded to the nearest one, the number would never move.
    values, steps = torch.linspace(0.5, 1.0, 4096), 500
    moments = Moments(values)
    for _, first, second in moments.parts(0):
        first.copy_(values)
        second.copy_(values)
    for step in range(steps):
        for _, first, second in moments.parts(step + 1):
            first.mul_(0.999)
            second.mul_(0.999)
    (_, first, second) = next(moments.parts(0))
    # Each number is a random walk of some 3 % in 500 steps; the mean of 4,096 is known to 0.05 %.
    for got in (first, second):
        assert float(got.mean()) == pytest.approx(0.999**steps * 0.75, rel=5e-3)


def test_parts_cover_a_tensor_that_is_no_multiple_of_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam8bit, "CHUNK", 2 * BLOCK)
    x = torch.rand(5 * BLOCK + 3, generator=torch.Generator().manual_seed(0))
    moments = Moments(x)
    parts = []
    for part, first, second in moments.parts(1):
        first.copy_(-x[part])
        second.copy_(x[part] ** 2)
        parts.append((part.start, part.stop))
    assert parts == [(0, 512), (512, 1024), (1024, 1283)]
    for part, first, second in moments.parts(1):
        torch.testing.assert_close(
            first, -x[part], rtol=0, atol=0.02
        )  # the widest gap is 0.9 / 64 of the largest
        torch.testing.assert_close(second.sqrt(), x[part], rtol=0, atol=0.01)


def test_eight_bits_learn_as_float32_does() -> None:
    config = replace(FREE, beta2=0.999, lr=1e-3, max_grad_norm=1.0, weight_decay=0.0)
    curves = []
    for bits in (32, 8):
        model = make()
        curves.append(train(model, Optimizer(model, replace(config, adam_bits=bits)), range(160), lr=1e-3))
    plain, packed = (torch.tensor(curve).view(-1, 20).mean(1) for curve in curves)
    assert plain[-1] < 0.3 * plain[0]
    # Measured: within 0.08 % of each other wherever on the curve (means of 20 steps); with rounding to the nearest code
    # it is 0.9 %, since a second moment that decays by 0.001 a step then stays where it is.
    torch.testing.assert_close(packed, plain, rtol=0.003, atol=0)


def test_eight_bits_are_used_for_large_tensors_only() -> None:
    state = Optimizer(make(), replace(FREE, adam_bits=8)).tensors()
    packed = {name.removesuffix("/exp_avg/codes") for name in state if name.endswith("/exp_avg/codes")}
    assert packed == {name for name, p in make().named_parameters() if p.numel() >= 4096}
    assert {f"{name}/exp_avg_sq" for name, p in make().named_parameters() if p.numel() < 4096} <= set(state)
    count = {name: parameter.numel() for name, parameter in make().named_parameters()}
    stored = sum(t.nbytes for key, t in state.items() if key.rpartition("/exp_avg")[0] in packed)
    assert stored == pytest.approx(sum(2 * (1 + 4 / BLOCK) * count[name] for name in packed), rel=1e-3)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"adam_bits": 8}, {"offload_state": True}, {"update_in_backward": True}])
def test_a_run_that_was_cut_ends_bitwise_the_same(options: dict[str, Any], dtype: torch.dtype) -> None:
    config = replace(FREE, **options)
    model = make(dtype)
    optimizer = Optimizer(model, config)
    train(model, optimizer, range(3))
    stored = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    model_then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, range(3, 6))
    twin = make(dtype)
    resumed = Optimizer(twin, config)
    twin.load_state_dict(model_then)
    resumed.load_tensors(stored)
    train(twin, resumed, range(3, 6))
    assert torch.equal(weights(twin), weights(model))
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, optimizer.tensors()[name]), name


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 8])
def test_an_update_in_the_backward_pass_is_the_update_after_it(dtype: torch.dtype, bits: int) -> None:
    models = make(dtype), make(dtype)
    config = replace(FREE, adam_bits=bits)
    plain = Optimizer(models[0], config)
    early = Optimizer(models[1], replace(config, update_in_backward=True))
    prepare_model(models[1], replace(config, checkpoint_layers=True, checkpoint_kind="mlp"))
    for step in range(4):
        norms = []
        for model, optimizer in zip(models, (plain, early), strict=True):
            optimizer.begin(1e-2)
            loss_of(model, step).backward()
            assert all((p.grad is None) == (optimizer is early) for p in model.parameters())
            norms.append(optimizer.step(1e-2))
        assert norms[1] == pytest.approx(norms[0], rel=1e-12)  # the sum's order is that of arrival
    # The tied table has its two gradients added before it is updated, or it would be updated twice.
    assert torch.equal(weights(models[0]), weights(models[1]))


def test_a_backward_pass_that_was_not_announced_updates_nothing() -> None:
    model = make()
    optimizer = Optimizer(model, replace(FREE, update_in_backward=True))
    before = weights(model)
    loss_of(model, 0).backward()  # as a rehearsal does
    assert torch.equal(weights(model), before)
    assert all(p.grad is not None for p in model.parameters())
    twin = make()
    for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.grad = None if other.grad is None else other.grad.clone()
    Optimizer(twin, FREE).step(1e-2)
    optimizer.begin(1e-2)  # too late for what is there already, which the step itself must use
    optimizer.step(1e-2)
    assert torch.equal(weights(twin), weights(model))
    assert not torch.equal(weights(model), before)


def test_a_second_gradient_before_the_step_is_refused() -> None:
    model = make()
    optimizer = Optimizer(model, replace(FREE, update_in_backward=True))
    optimizer.begin(1e-2)
    loss_of(model, 0).backward()
    with pytest.raises(
        UserError, match=r"a second gradient.*one micro-batch an update: raise optim.token_budget"
    ):
        loss_of(model, 1).backward()


def test_from_a_bad_gradient_on_nothing_is_updated() -> None:
    model = make()
    optimizer = Optimizer(model, replace(FREE, update_in_backward=True))
    train(model, optimizer, range(1))
    before = weights(model)
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    optimizer.begin(1e-2)
    (loss_of(model, 1) * float("nan")).backward()
    assert math.isnan(optimizer.step(1e-2))
    assert torch.equal(weights(model), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.tensors().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_does_not_keep_its_optimizers() -> None:
    model = make()
    old = weakref.ref(Optimizer(model, replace(FREE, update_in_backward=True)))
    new = Optimizer(model, replace(FREE, update_in_backward=True))
    gc.collect()
    assert old() is None
    assert train(model, new, range(2))[1] > 0


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 8])
def test_state_elsewhere_gives_the_same_weights(dtype: torch.dtype, bits: int) -> None:
    # Here both places are the host: what is tested is that a master apart from its parameter goes the same way.
    config = replace(FREE, adam_bits=bits, max_grad_norm=0.5)
    models = make(dtype), make(dtype)
    plain = Optimizer(models[0], config)
    apart = Optimizer(models[1], replace(config, offload_state=True))
    losses = [
        train(model, optimizer, range(4)) for model, optimizer in zip(models, (plain, apart), strict=True)
    ]
    assert losses[0] == losses[1]
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert apart.tensors().keys() == plain.tensors().keys()


def test_no_clipping_leaves_gradients_as_they_are() -> None:
    model = make()
    optimizer = Optimizer(model, FREE)
    (1000 * loss_of(model, 0)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert optimizer.step(1e-3) > 100
    for name, tensor in optimizer.tensors().items():
        if name.endswith("/exp_avg"):
            torch.testing.assert_close(
                tensor, 0.1 * gradients[name.removesuffix("/exp_avg")], rtol=1e-6, atol=0
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_in_backward": True}, "max_grad_norm = 1: .*switch clipping off with max_grad_norm = inf"),
        ({"max_grad_norm": math.nan}, "max_grad_norm = nan: expected a number above 0"),
        ({"checkpoint_kind": "mlp"}, "checkpoint_kind = mlp: expected with checkpoint_layers"),
        ({"offload_inputs": True}, "offload_inputs = true: expected with checkpoint_layers"),
        (
            {"offload_inputs": True, "checkpoint_layers": True, "checkpoint_kind": "mlp"},
            "offload_inputs = true: expected with checkpoint_layers = true and checkpoint_kind = layer",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**options)


def test_what_needs_a_gpu_or_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    for options in ({"offload_state": True}, {"offload_inputs": True, "checkpoint_layers": True}):
        with pytest.raises(UserError, match=f"optim.{next(iter(options))} = true on a CPU: expected a GPU"):
            prepare_model(model, OptimConfig(**options))
    monkeypatch.setattr("whet.train.step.world_size", lambda: 2)
    with pytest.raises(UserError, match="update_in_backward = true on 2 ranks: expected one"):
        prepare_model(model, replace(FREE, update_in_backward=True))
    prepare_model(model, FREE)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_host_trains_a_model_on_a_gpu(dtype: torch.dtype, bits: int) -> None:
    config = replace(FREE, adam_bits=bits, lr=1e-3)
    models = make(dtype, device="cuda"), make(dtype, device="cuda")
    plain = Optimizer(models[0], config)
    apart = Optimizer(models[1], replace(config, offload_state=True))
    assert all(tensor.device.type == "cpu" for tensor in apart.tensors().values())
    curves = [train(m, o, range(60), lr=1e-3) for m, o in zip(models, (plain, apart), strict=True)]
    ends = [sum(curve[-10:]) / 10 for curve in curves]
    assert ends[1] == pytest.approx(
        ends[0], rel=0.1
    )  # two machines' roundings, and other random rounding with 8 bits
