"""Decoding in few calls: bit for bit the model's own forward pass, and only where every part of the model is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from kernel_cases import room
from torch import nn

from whet.generate import engine as engine_module
from whet.generate.activations import can_keep
from whet.generate.cache import KVCache
from whet.generate.engine import Engine, Request
from whet.generate.fused import can_fuse
from whet.generate.plain import PlainSteps, can_step, turns_exactly
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.kernels import dispatch
from whet.model.config import ModelConfig, RopeScaling
from whet.model.transformer import LanguageModel, Linear, init_weights
from whet.model.weights import build_model

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = ModelConfig(
    family="llama", vocab_size=101, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, max_positions=256,
)  # fmt: skip
STRETCHED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
SHAPES = {
    "llama": SHAPE,
    "biases": replace(SHAPE, attention_bias=True, mlp_bias=True, tie_embeddings=False),
    "stretched": replace(SHAPE, rope_scaling=STRETCHED),
    "qwen2": replace(SHAPE, family="qwen2", num_kv_heads=4),
    "qwen3": replace(SHAPE, family="qwen3", num_kv_heads=1, head_dim=32),
    "odd": replace(SHAPE, intermediate_size=75),
    "wide": replace(SHAPE, family="qwen2", hidden_size=512, head_dim=64, num_heads=6),
    "wide qwen3": replace(SHAPE, family="qwen3", hidden_size=512, intermediate_size=768),
}


def make_model(shape: ModelConfig) -> LanguageModel:
    """Weights, biases and norms that are far from 0 and 1: one that is forgotten shows."""
    model = build_model(shape)
    init_weights(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
    return model.eval()


def make_requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    requests = []
    for index, length in enumerate((3, 40, 119)):  # the last one passes a key block of 128 on its way
        ids = tuple(torch.randint(0, 101, (length,), generator=generator).tolist())
        seeds = tuple(sequence_seed("plain", index, sample) for sample in range(7))
        requests.append(Request(prompt_ids=ids, seeds=seeds))
    return requests


def make_cache(model: LanguageModel) -> KVCache:
    return KVCache(model.config, room(4, 64), model.head_weight.dtype, torch.device("cpu"))


@pytest.mark.some(6)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_are_those_of_the_general_path(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(threads)  # conftest.py sets it back
    model = make_model(SHAPES[name])
    runs: list[int] = []
    original = PlainSteps.run

    def run(
        self: PlainSteps, tokens_B: torch.Tensor, positions_B: torch.Tensor, deepest: int
    ) -> torch.Tensor:
        runs.append(tokens_B.shape[0])
        return original(self, tokens_B, positions_B, deepest)

    monkeypatch.setattr(PlainSteps, "run", run)

    def generate() -> Any:
        engine = Engine(model, stop_ids=(5, 17), max_rows=19)  # rows end and move; 19 needs padding to 32
        return engine.generate(make_requests(), SamplingParams(temperature=0.8, max_new_tokens=24))

    fewer = generate()
    assert len(runs) >= 23
    assert max(runs) == 19
    assert any(count % 16 == 0 for count in runs) or min(runs) < 16
    runs.clear()
    monkeypatch.setattr(engine_module, "can_step", lambda *_: False)
    assert generate() == fewer  # ids, and log-probabilities to the last bit
    assert not runs


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: an angle off by one position changes what is drawn."""
    model = make_model(SHAPE)

    def generate() -> Any:
        return Engine(model, stop_ids=()).generate(make_requests(), SamplingParams(max_new_tokens=8))

    right = generate()
    original = PlainSteps.__init__

    def shifted(self: PlainSteps, *arguments: Any) -> None:
        original(self, *arguments)
        self._angles = self._angles.roll(1, 0)

    monkeypatch.setattr(PlainSteps, "__init__", shifted)
    assert generate() != right


@pytest.mark.parametrize("name", SHAPES)
def test_plain_models_are_known(name: str) -> None:
    model = make_model(SHAPES[name])
    assert can_step(model, make_cache(model))


class Doubled(Linear):
    """A layer that somebody derived: it computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return twice the product."""
        return 2 * super().forward(input)


def _hook(*_: Any) -> None:
    return None


def _replace_linear(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = Doubled(64, 96, bias=False)


def _override(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.forward = lambda x: 2 * Linear.forward(linear, x)


def _transpose(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())


CHANGES: dict[str, Callable[[Any], object]] = {
    "a forward hook": lambda model: model.model.layers[1].self_attn.q_proj.register_forward_hook(_hook),
    "a hook before": lambda model: model.model.norm.register_forward_pre_hook(_hook),
    "a derived layer": _replace_linear,
    "a layer's own forward": _override,
    # As Module.compile leaves it; PyTorch's compiler itself takes seconds to import.
    "a compiled part": lambda model: setattr(model.model.layers[0].mlp, "_compiled_call_impl", _hook),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float64": lambda model: model.to(torch.float64),
    "one bfloat16 layer": lambda model: model.model.layers[0].mlp.to(torch.bfloat16),
    "a transposed weight": _transpose,
    "a buffer on another device": lambda model: model.register_buffer("x", torch.empty(0, device="meta")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_known_takes_the_general_path(change: str) -> None:
    model = make_model(SHAPE)
    CHANGES[change](model)
    assert not can_step(model, make_cache(model))


def test_another_architecture_autocast_global_hooks_and_kernels_take_the_general_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpt2 = make_model(replace(SHAPE, family="gpt2", num_kv_heads=4))
    assert not can_step(gpt2, make_cache(gpt2))
    model = make_model(SHAPE)
    kv_cache = make_cache(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_step(model, kv_cache)
    handle = nn.modules.module.register_module_forward_hook(_hook)
    assert not can_step(model, kv_cache)
    handle.remove()
    assert can_step(model, kv_cache)
    tiled = KVCache(model.config, room(4, 64), torch.float32, torch.device("cpu"), is_tiled=True)
    assert not can_step(model, tiled)
    monkeypatch.setattr("whet.kernels.cpu.build.library", lambda: object())  # C++ products in the trainer
    assert not can_step(model, kv_cache)


@dataclass(frozen=True, kw_only=True)
class Later(ModelConfig):
    """A config with a flag that no fast path knows."""

    window: int = 0


def test_an_option_that_was_added_to_the_config_takes_the_general_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each path beside the modules' own lists what it knows; all else that is on makes it decline."""
    monkeypatch.setattr(dispatch, "runs_cpp", lambda *_, **__: True)
    for window in (0, 4):
        model = make_model(
            Later(**{item.name: getattr(SHAPE, item.name) for item in fields(SHAPE)}, window=window)
        )
        tiled = KVCache(model.config, room(4, 64), torch.float32, torch.device("cpu"), is_tiled=True)
        is_known = window == 0
        assert can_fuse(model, tiled, torch.float32) == is_known
        assert can_keep(model) == is_known
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "runs_cpp", lambda *_, **__: False)
            assert can_step(model, make_cache(model)) == is_known


def test_an_adapter_takes_the_general_path_and_is_applied() -> None:
    """An adapter is a hook: what it adds must be in what is sampled."""
    model = make_model(SHAPE)
    requests, params = make_requests(), SamplingParams(max_new_tokens=6)
    before = Engine(model, stop_ids=()).generate(requests, params)
    down: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    handle = down.register_forward_hook(lambda module, inputs, output: 2 * output)
    doubled = Engine(model, stop_ids=()).generate(requests, params)
    handle.remove()
    with torch.no_grad():
        down.weight.mul_(2)
    assert doubled != before
    assert doubled == Engine(model, stop_ids=()).generate(requests, params)


def test_turned_products_are_left_where_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.mm
    turns_exactly.cache_clear()
    monkeypatch.setattr(
        torch, "mm", lambda left, right, **kwargs: original(left, right, **kwargs) * (1 + 2**-20)
    )
    assert not turns_exactly(32, 64)
    turns_exactly.cache_clear()
