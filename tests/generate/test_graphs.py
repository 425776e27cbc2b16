"""CUDA graphs of a decode step, as far as a fake of torch.cuda's graphs goes; the real ones are in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from kernel_cases import room

from whet.generate.cache import Decode, KVCache
from whet.generate.graphs import BUCKETS, DecodeGraphs, StaticDecode
from whet.kernels.mode import VARIABLE
from whet.model.config import ModelConfig

SHAPE = ModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)  # fmt: skip


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.waits = 0

    def wait_stream(self, other: object) -> None:
        self.waits += 1


class FakeGraph:
    """Keeps what was called while it recorded, and calls it again."""

    recording: FakeGraph | None = None
    pools: list[object] = []

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def pool(self) -> str:
        return "the pool"

    def replay(self) -> None:
        for call in self.calls:
            call()


@contextmanager
def record(graph: FakeGraph, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
    FakeGraph.pools.append(pool)
    FakeGraph.recording = graph
    yield
    FakeGraph.recording = None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    FakeGraph.pools = []
    monkeypatch.delenv(VARIABLE, raising=False)  # `eager`, where a user has it, records no graphs
    fakes: dict[str, Any] = {
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "graph": record,
        "stream": lambda stream: nullcontext(),
        "current_stream": FakeStream,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return torch.device("cuda")


class Steps:
    """Counts tokens of rows; a kernel that runs while a graph records is recorded instead."""

    def __init__(self, num_rows: int) -> None:
        self.counts = torch.zeros(num_rows, dtype=torch.int64)
        self.weight = torch.ones(2)
        self.ran: list[int] = []
        self.autocast_caches: list[bool] = []

    def __call__(self, rows: int) -> None:
        self.ran.append(rows)
        self.autocast_caches.append(torch.is_autocast_cache_enabled())
        counts, weight = self.counts, self.weight

        def launch() -> None:
            counts[:rows] += int(weight[0])

        FakeGraph.recording.calls.append(launch) if FakeGraph.recording else launch()

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.counts]


def make(num_rows: int, device: torch.device) -> tuple[Steps, DecodeGraphs]:
    steps = Steps(num_rows)
    return steps, DecodeGraphs(steps, steps.tensors, num_rows, device)


def test_a_cpu_just_runs_the_step() -> None:
    steps, runner = make(20, torch.device("cpu"))
    for live in (20, 7, 7):
        runner.run(live)
    assert steps.ran == [20, 7, 7]
    assert steps.counts.tolist() == [3] * 7 + [1] * 13


def test_buckets() -> None:
    assert BUCKETS[:6] == (1, 2, 4, 8, 16, 24)
    assert BUCKETS[-1] == 256
    assert len(BUCKETS) == 35
    assert make(20, torch.device("cpu"))[1]._buckets == [1, 2, 4, 8, 16, 20]
    assert make(16, torch.device("cpu"))[1]._buckets == [1, 2, 4, 8, 16]
    assert make(1, torch.device("cpu"))[1]._buckets == [1]
    assert make(999, torch.device("cpu"))[1]._buckets == list(BUCKETS)


def test_every_run_is_one_step_of_the_live_rows(cuda: torch.device) -> None:
    steps, runner = make(20, cuda)
    for live in (5, 5, 8, 3, 3, 17, 3):
        before = steps.counts.clone()
        runner.run(live)
        assert (steps.counts - before)[:live].tolist() == [1] * live
    # Largest first, each size run once for real and recorded once; all other runs are replays.
    assert steps.ran == [20, 20, 8, 8, 4, 4]
    assert FakeGraph.pools == [None, "the pool", "the pool"]


def test_new_values_are_seen_and_moved_tensors_are_captured_again(cuda: torch.device) -> None:
    steps, runner = make(2, cuda)
    runner.run(2)
    runner.run(2)
    steps.weight.fill_(10)  # an optimizer in place
    runner.run(2)
    assert steps.counts.tolist() == [12, 12]
    assert steps.ran == [2, 2]
    old = steps.weight
    steps.weight = torch.full((2,), 100.0)
    runner.run(1)
    assert steps.counts.tolist() == [112, 112]
    runner.run(2)
    assert steps.counts.tolist() == [212, 212]
    assert steps.ran == [2, 2, 2, 2]
    assert old.data_ptr() != steps.weight.data_ptr()
    steps.weight = steps.weight[:1]  # another shape in the same place
    runner.run(2)
    assert steps.ran == [2] * 6


def test_a_key_has_graphs_of_its_own(cuda: torch.device) -> None:
    steps, runner = make(2, cuda)
    for key in ("warm", "greedy", "warm", "greedy"):
        runner.run(2, key)
    assert steps.ran == [2, 2, 2, 2]
    assert steps.counts.tolist() == [4, 4]


def test_clear_and_the_switch(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, runner = make(300, cuda)
    runner.run(300)
    assert steps.ran == [300]  # larger than the largest bucket
    runner.run(1)
    assert steps.ran == [300, 256, 256]
    runner.clear()
    runner.run(256)
    assert steps.ran == [300, 256, 256, 256, 256]
    monkeypatch.setenv("WHET_KERNELS", "eager")
    runner.run(3)
    assert steps.ran[-1] == 3


def test_autocast_keeps_no_casts_while_recording(cuda: torch.device) -> None:
    steps, runner = make(2, cuda)
    assert torch.is_autocast_cache_enabled()
    runner.run(2)
    assert steps.autocast_caches == [False, False]
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_decode_is_decode(dtype: torch.dtype) -> None:
    """Same rows written, same outputs, whatever stands behind the rows' lengths; row padding is zero."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 31, 50])
    q, k, v = (torch.randn(16, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    caches = [KVCache(SHAPE, room(4, 64), dtype, torch.device("cpu")) for _ in range(2)]
    filling = torch.randn(caches[0].keys.shape, generator=generator)
    for cache in caches:
        cache.keys.copy_(filling)
        cache.values.copy_(-filling)
    ours = StaticDecode(caches[0], positions).attend(1, q, k, v)
    theirs = Decode(caches[1], positions, 64, "exact").attend(1, q, k, v)
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)
    # `Decode` rounds the scaled query and the probabilities to 16 bits, the kernel's twin nothing but the result.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-2)
    assert torch.equal(ours[3:], torch.zeros_like(ours[3:]))
