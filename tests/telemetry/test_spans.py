"""Ranges: who hears of them and in which order, what they cost when nobody does, and the names that are used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
import time
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from needs import needs

import whet
from whet.telemetry import spans
from whet.telemetry.spans import (
    NAMES,
    NvtxRanges,
    Recorder,
    TraceRanges,
    from_environment,
    listening,
    span,
    spanned,
)
from whet.types import UserError

SOURCE_NAMES = {  # requirements, S1-19, letter by letter
    *("forward", "backward", "optimizer_step"),
    *("rollout_generation", "reward_computation", "advantage_computation", "policy_loss_backward"),
    *("async_next_rollout", "policy_update"),
}
CPU = torch.device("cpu")


class Heard:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def enter(self, name: str) -> None:
        self.told.append(f"+{name}")

    def exit(self, name: str) -> None:
        self.told.append(f"-{name}")


def nested() -> None:
    with span("policy_loss_backward"):
        for _ in range(2):
            with span("forward"):
                pass


def test_a_listener_hears_ranges_in_their_order() -> None:
    heard = Heard()
    with listening(heard):
        nested()
    nested()  # nobody listens any more
    assert heard.told == [
        *("+policy_loss_backward", "+forward", "-forward", "+forward", "-forward"),
        "-policy_loss_backward",
    ]


def test_a_range_ends_with_an_error_and_the_listener_before_comes_back() -> None:
    outer, inner = Heard(), Heard()
    with listening(outer):
        with pytest.raises(ZeroDivisionError), listening(inner), span("forward"):
            raise ZeroDivisionError
        with span("backward"):
            pass
    assert inner.told == ["+forward", "-forward"]
    assert outer.told == ["+backward", "-backward"]


def test_a_range_ends_at_the_listener_that_it_began_at() -> None:
    first, second = Heard(), Heard()
    with listening(first):
        context = span("forward")
        with context, listening(second), span("head"):
            pass
    assert (first.told, second.told) == (["+forward", "-forward"], ["+head", "-head"])


def test_spanned_is_the_function_with_a_range_around_each_call() -> None:
    @spanned("head")
    def add(a: int, *, b: int) -> int:
        """Add."""
        return a + b

    heard = Heard()
    assert add(1, b=2) == 3  # made before somebody listens, heard as soon as somebody does
    with listening(heard):
        assert add(3, b=4) == 7
    assert heard.told == ["+head", "-head"]
    assert (add.__name__, add.__doc__) == ("add", "Add.")


def test_a_name_that_is_not_declared_is_a_fault() -> None:
    with listening(Heard()), pytest.raises(AssertionError, match="forwards"):
        span("forwards")


def test_when_nobody_listens_nothing_is_made_and_nothing_measurable_is_spent() -> None:
    assert span("forward") is span("backward")

    @spanned("head")
    def nothing() -> None:
        return

    def ranged() -> None:
        with span("head"):
            pass

    # A decode step of the smallest model takes a millisecond and has four ranges: 10 microseconds each are 4 %, and
    # 0.3 are what it takes; the bound leaves room for a loaded machine.
    for function in (nothing, ranged):
        assert min(timeit.repeat(function, number=2000, repeat=5)) / 2000 < 10e-6


def test_names_of_the_package_are_declared_and_those_of_the_source_are_there() -> None:
    assert set(NAMES) >= SOURCE_NAMES
    used: set[str] = set()
    for path in Path(str(whet.__file__)).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"\bspan(ned)?\(", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("span", "spanned", "spans.span"):
                used |= {item.value for item in node.args if isinstance(item, ast.Constant)}
    assert used <= set(NAMES)
    assert used >= SOURCE_NAMES - {"async_next_rollout", "policy_update"}


def test_recorder_gives_paths_steps_and_times() -> None:
    recorder = Recorder(CPU)
    with listening(recorder):
        for _ in range(2):
            with span("step"):
                with span("forward"), span("head"):
                    time.sleep(0.01)
                with span("backward"):
                    pass
    found = recorder.ranges()
    paths = [("step", "forward", "head"), ("step", "forward"), ("step", "backward"), ("step",)]
    assert [item.path for item in found] == paths * 2
    assert [item.step for item in found] == [0] * 4 + [1] * 4
    head, forward, backward, step = (item.seconds for item in found[:4])
    assert 0.01 <= head <= forward <= step
    assert forward + backward <= step


def test_recorder_keeps_threads_apart_and_leaves_out_what_began_before() -> None:
    recorder = Recorder(CPU)
    with listening(recorder):
        recorder.exit("step")  # it began before the recorder
        with span("step"):
            thread = threading.Thread(target=nested)
            thread.start()
            thread.join()
    paths = [item.path for item in recorder.ranges()]
    assert paths.count(("policy_loss_backward", "forward")) == 2
    assert paths[-1] == ("step",)


class FakeCuda:
    """What spans call of torch.cuda; a clock that its kernels move, and a record of the calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.clock_ms, self.capturing = 0.0, False
        fake = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.clock_ms

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at

        def note(text: str) -> Any:
            return lambda *words: self.calls.append(" ".join([text, *words]))

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", note("synchronize"))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda.profiler, "start", note("start"))
        patch.setattr(torch.cuda.profiler, "stop", note("stop"))
        ranges = SimpleNamespace(range_push=note("push"), range_pop=note("pop"))
        patch.setattr(torch.cuda, "nvtx", ranges)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_on_a_gpu_the_stream_s_clock_counts(cuda: FakeCuda) -> None:
    recorder = Recorder(torch.device("cuda"))
    with listening(recorder), span("step"):
        with span("forward"):
            cuda.clock_ms += 1500.0
        cuda.capturing = True
        with span("head"):  # an event would become a part of the graph
            pass
        cuda.capturing = False
        cuda.clock_ms += 500.0
    assert [(item.path[-1], item.seconds) for item in recorder.ranges()] == [("forward", 1.5), ("step", 2.0)]
    assert cuda.calls == ["synchronize"]


def run_steps(count: int) -> None:
    for _ in range(count):
        with span("step"), span("forward"):
            pass


def test_nvtx_hears_exactly_the_names(cuda: FakeCuda) -> None:
    before = torch._C._is_multithreading_enabled()
    try:
        with listening(NvtxRanges()):
            run_steps(1)
            assert not torch._C._is_multithreading_enabled()  # or the backward's kernels belong to no range
    finally:
        torch.autograd.set_multithreading_enabled(before)
    assert cuda.calls == ["push step", "push forward", "pop", "pop"]


def test_the_capture_holds_the_steps_that_were_asked_for(cuda: FakeCuda) -> None:
    before = torch._C._is_multithreading_enabled()
    try:
        with listening(NvtxRanges(1, 2)):
            run_steps(4)
    finally:
        torch.autograd.set_multithreading_enabled(before)
    step = ["push step", "push forward", "pop", "pop"]
    assert cuda.calls == [*step, "synchronize", "start", *step, *step, "synchronize", "stop", *step]


def test_the_variable_says_who_listens(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment("") is None
    found = from_environment("2:3")
    assert isinstance(found, NvtxRanges)
    assert (found._first, found._count) == (2, 3)
    assert isinstance(from_environment("1"), NvtxRanges)
    for text in ("0", "yes", "2:0", "2:", ":3", "-1:2", "1 ", "²:3", "1" * 20 + ":1"):
        with pytest.raises(UserError, match="WHET_NVTX"):
            from_environment(text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU"):
        from_environment("1")


@pytest.mark.ci
@needs("no gpu")
def test_the_variable_without_a_gpu_is_one_line() -> None:
    words = [sys.executable, "-m", "whet", "sft", "demo", "--dry-run"]
    result = subprocess.run(words, env=os.environ | {"WHET_NVTX": "1"}, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("whet: error: WHET_NVTX = 1")
    assert result.stderr.count("\n") == 1


def test_trace_ranges_are_the_profiler_s() -> None:
    listener = TraceRanges()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        listener.exit("step")  # it began before the trace
        with listening(listener), span("forward"), span("head"):
            torch.ones(3).sum()
    events = {event.name: event for event in found.events()}
    head, forward = events["head"].time_range, events["forward"].time_range
    assert forward.start <= head.start <= events["aten::sum"].time_range.start <= head.end <= forward.end


def test_nobody_listens_in_this_process() -> None:
    assert spans._listener is None
