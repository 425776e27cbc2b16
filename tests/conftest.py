"""Flags, threads and the tiny model that several tests train."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

# What is tested must not depend on which kernels a busy machine happens to find faster.
os.environ.setdefault("WHET_KERNELS", "cpp")
# Two test processes share two cores: threads that spin while they wait take them from each other (twice the time).
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Where the shell forbids to keep what is compiled, each of the many processes that tests start compiles all of PyTorch.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# As in an environment that was activated: printed commands begin with `whet`.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

import pytest
import torch
from needs import require

from whet.eval.audit import audit
from whet.generate import probe
from whet.generate.policy import PolicyConfig
from whet.kernels import dispatch
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Problem

gc.disable()  # until all tests are collected: a fifth of that time, for next to nothing is garbage
# Rewriting the asserts of all test files takes ten seconds a process: the result is kept, whatever the shell says.
sys.dont_write_bytecode = False

TINY_SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)

# What every run of RL does before its first step is half of a tiny run's time: less of it, except in its own tests.
WHOLE_START = {(probe, "PROBE_TOKENS"): probe.PROBE_TOKENS, (audit, "NUM_PREFLIGHT"): audit.NUM_PREFLIGHT}
probe.PROBE_TOKENS, audit.NUM_PREFLIGHT = 5, 1

# Ends whatever a test process started when that process ends, also by SIGKILL: by a mark in the environment, which
# finds grandchildren and sessions of their own as well.
WATCHER = """
import os, sys
sys.stdin.buffer.read()
for _ in range(3):
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if sys.argv[1].encode() in file.read().split(b"\\0") and int(name) != os.getpid():
                    os.kill(int(name), 9)
        except OSError:
            pass
"""

FEW = 200
GOLDEN = Path(__file__).parent / "golden"
"""A few rows of public data; see its README."""


@pytest.fixture
def whole_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe and the audit before a run's first step as users have them."""
    for (module, name), value in WHOLE_START.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler: no C++ kernels."""
    monkeypatch.setattr("whet.kernels.cpu.build.library", lambda: None)


@pytest.fixture(params=["kernels", "eager"])
def either(request: pytest.FixtureRequest) -> None:
    """The C++ kernels where there is a compiler, and what runs without one."""
    if request.param == "eager":
        request.getfixturevalue("eager")
    else:
        require("kernels")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow or ci, too")
    parser.addoption("--ci", action="store_true", help="run the tests marked ci, too, as .ci/run does")
    parser.addoption(
        "--skipped-to",
        metavar="FILE",
        help="list skipped tests there, for --skipped-in",
    )
    parser.addoption("--skipped-in", metavar="FILE", help="run only tests that are listed there")


WATCHED = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_unconfigure(config: pytest.Config) -> None:
    watcher = config.stash.get(WATCHED, None)
    if watcher is not None:
        watcher.communicate()


def pytest_configure(config: pytest.Config) -> None:
    """Hide a GPU from all tests but those marked gpu: what they promise to the bit is promised on a CPU."""
    if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:
        mark = f"WHET_TESTS_{os.getpid()}"
        os.environ[mark] = "1"
        words = [sys.executable, "-I", "-S", "-c", WATCHER, f"{mark}=1"]
        config.stash[WATCHED] = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The process that gathers the reports of others has none of its own to note.
    if (path := config.getoption("--skipped-to")) and not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(SkippedTo(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="longer than a few seconds: run with --slow")
    ci = pytest.mark.skip(reason="seconds for what rarely changes: .ci/run has it; run with --ci or --slow")
    gpu = pytest.mark.skip(reason="needs a CUDA device, and is asked for: -m gpu")
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        some = item.get_closest_marker("some")
        if some is not None and item.get_closest_marker(some.kwargs.get("others", "ci")) is None:
            cases.setdefault(item.nodeid.split("[", 1)[0], []).append(item)
    for same in cases.values():
        some = same[0].get_closest_marker("some")
        assert some is not None
        many = min(some.args[0], len(same))
        kept = {place * len(same) // many for place in range(many)}
        for place, item in enumerate(same):
            if place not in kept:
                item.add_marker(getattr(pytest.mark, some.kwargs.get("others", "ci")))
    if path := config.getoption("--skipped-in"):
        listed = set(Path(path).read_text(encoding="utf-8").split("\n"))
        # A file may have been skipped whole, and a test before it got its parameters.
        chosen = [
            i
            for i in items
            if not listed.isdisjoint((i.nodeid, *i.nodeid.split("[", 1)[:1], i.nodeid.split("::")[0]))
        ]
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        # The longest come first, so that neither core is idle at the end.
        items[:] = sorted(chosen, key=lambda item: not item.nodeid.startswith("tests/learning"))
    for item in items:  # not by `item.keywords`: names of folders are among them, as of a clone in `ci`
        if item.get_closest_marker("slow") is not None and not config.getoption("--slow"):
            item.add_marker(slow)
        is_asked = config.getoption("--ci") or config.getoption("--slow")
        if item.get_closest_marker("ci") is not None and not is_asked:
            item.add_marker(ci)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(gpu)


class SkippedTo:
    """Adds what is skipped to a file, a line each, from all of pytest's processes.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a skipped test."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that is skipped whole."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_collection_finish() -> None:
    """Keep the collector from scanning a million objects of modules and tests again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a tenth of all time otherwise
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run every test with one thread and all kernels, unless it sets others itself; a run's choice is the process's."""
    torch.set_num_threads(1)
    dispatch.take(None)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def tiny_policy() -> PolicyConfig:
    """The demo's policy, small enough that a training step takes milliseconds."""
    return replace(demo_policy(), model=TINY_SHAPE, max_rows=64)


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's tokenizer as far as the texts of the tests need it; its other ids are filled up with what no text has."""
    content = json.loads((GOLDEN / "gpt2/tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    missing = set(range(50257)) - set(vocab.values())
    vocab |= {f"<no token {index}>": index for index in missing}
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    shutil.copy(GOLDEN / "gpt2/config.json", folder)
    return folder


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a run's report without its curves: drawing them is most of a tiny run's time (two seconds)."""
    monkeypatch.setattr("whet.report.markdown.draw_figures", lambda series, folder: [])


ALL_PROBLEMS = Arithmetic.problems


@cache
def first_problems(split: str) -> tuple[Problem, ...]:
    """Return the first problems of an arithmetic split, made once for all tests."""
    return tuple(ALL_PROBLEMS(Arithmetic(), split)[:FEW])


@pytest.fixture
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the arithmetic splits short: making and encoding thousands of problems is most of a tiny run's time."""
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: list(first_problems(split)))
