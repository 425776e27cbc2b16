"""Flags, threads and the tiny model that several tests train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

# What is tested must not depend on which kernels a busy machine happens to find faster.
os.environ.setdefault("WHET_KERNELS", "cpp")

import pytest
import torch

from whet.generate.policy import PolicyConfig
from whet.kernels.cpu.build import library, reason
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy
from whet.tasks.made.arithmetic import Arithmetic

TINY_SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)

FEW = 200


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler: no C++ kernels."""
    monkeypatch.setattr("whet.kernels.cpu.ops.library", lambda: None)
    monkeypatch.setattr("whet.train.optim.step.library", lambda: None)


@pytest.fixture(params=["kernels", "eager"])
def either(request: pytest.FixtureRequest) -> None:
    """The C++ kernels where there is a compiler, and what runs without one."""
    if request.param == "eager":
        request.getfixturevalue("eager")
    elif library() is None:
        pytest.skip(reason())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="longer than a few seconds: run with --slow")
    gpu = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(gpu)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run every test with one thread, unless it sets another number itself."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def tiny_policy() -> PolicyConfig:
    """The demo's policy, small enough that a training step takes milliseconds."""
    return replace(demo_policy(), model=TINY_SHAPE, max_rows=64)


@pytest.fixture
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the arithmetic splits short: encoding thousands of problems is most of a tiny run's time."""
    original = Arithmetic.problems
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: original(self, split)[:FEW])
