"""Ray itself: actors and drivers that are killed or asked to stop, workers that come late, and groups that restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import ray
from test_samplers import make_config, run
from test_workers import same

from whet.generate.backends import crew
from whet.generate.backends.crew import open_workers
from whet.generate.backends.workers import Workers
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.ranks.ray import ClusterConfig, open_ray
from whet.recipes.models import demo_policy
from whet.telemetry.log import read_metrics
from whet.train.rollout.grading import Graders

pytestmark = [
    pytest.mark.usefixtures("few_problems"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def actors(name: str = "RolloutWorker", of: int | None = None) -> list[psutil.Process]:
    """The processes of a kind of workers below this one, or another one."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def opening(monkeypatch: pytest.MonkeyPatch, on_call: Callable[[int], None]) -> list[Workers]:
    """Let something happen after each call that draws; return the samplers of the runs that follow."""
    made: list[Workers] = []

    def opened(config: ClusterConfig, policy: Policy) -> Workers:
        made.append(open_workers(config, policy))
        begin, calls = made[0]._crew.call, iter(range(1000))

        def call(hand: object, method: str, *arguments: object) -> object:
            ref = begin(hand, method, *arguments)
            if method == "generate":
                on_call(next(calls))
            return ref

        monkeypatch.setattr(made[0]._crew, "call", call)
        return made[0]

    monkeypatch.setattr(crew, "open_workers", opened)
    return made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_actors_change_no_bit_and_nothing_is_left(
    number: signal.Signals, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _ = run(make_config(tiny_policy, tmp_path / "alone"))

    def kill(call: int) -> None:
        if call in (2, 6):
            actor = actors()[0]
            os.kill(actor.pid, number)
            actor.wait(60)  # asked to stop, it takes its time: on a busy machine longer than the run

    made = opening(monkeypatch, kill)
    config = make_config(tiny_policy, tmp_path / "workers", cluster=ClusterConfig(rollout_workers=2))
    weights, metrics = run(config)
    assert same(alone, weights)
    assert made[0].num_lost >= 1
    assert made[0].num_started >= 3
    assert metrics[-1]["rl/prompts_consumed"] + metrics[-1]["rl/prompts_dropped"] == 8
    assert not actors()


def test_a_worker_that_finds_room_later_joins_and_one_that_leaves_is_not_waited_for(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers are asked for on a cluster whose second CPU something else has, until the run is under way."""
    alone, _ = run(make_config(tiny_policy, tmp_path / "alone", num_steps=8))
    number_of_ready: list[int] = []

    class Other:
        def here(self) -> int:
            return os.getpid()

    with open_ray("", cpus=2):
        assert ray.cluster_resources()["CPU"] == 2  # or there would be room for both
        other = ray.remote(Other).options(num_cpus=1).remote()
        ray.get(other.here.remote())

        def on_call(call: int) -> None:
            number_of_ready.append(sum(slot.is_ready for slot in made[0]._staff.slots))
            if call == 3:
                ray.kill(other)
                end = time.monotonic() + 120
                while len(actors()) < 2 and time.monotonic() < end:
                    time.sleep(0.1)

        made = opening(monkeypatch, on_call)
        cluster = ClusterConfig(rollout_workers=2, min_workers=1)
        weights, _ = run(make_config(tiny_policy, tmp_path / "workers", num_steps=8, cluster=cluster))
    assert same(alone, weights)
    assert number_of_ready[:4] == [1] * 4
    assert max(number_of_ready) == 2
    assert made[0].num_lost == 0
    assert not actors()


def test_killed_graders_change_no_score_and_nothing_is_left(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def length(problem, text):\n    return len(text) / 10\n")
    changes: dict[str, Any] = {"reward": (f"{tmp_path}/mine.py:length=0.5",), "preflight": "warn"}
    alone, rows = run(make_config(tiny_policy, tmp_path / "alone", **changes))
    made: list[Graders] = []
    work, calls = Graders.map, iter(range(1000))

    def map_with_a_kill(self: Graders, method: str, items: Any, *first: Any) -> list[Any]:
        made.append(self)
        found = actors("GradingWorker")
        if next(calls) in (2, 4) and found:
            os.kill(found[0].pid, signal.SIGKILL)
        return work(self, method, items, *first)

    monkeypatch.setattr(Graders, "map", map_with_a_kill)
    cluster = ClusterConfig(reward_workers=2, rollout_workers=1)
    weights, metrics = run(make_config(tiny_policy, tmp_path / "graded", cluster=cluster, **changes))
    assert same(alone, weights)
    assert [row["rl/reward_mean"] for row in metrics] == [row["rl/reward_mean"] for row in rows]
    assert made[0].num_started >= 3
    assert not actors("GradingWorker")
    assert not ray.is_initialized()  # to kill a grader of a Ray that has ended starts a new one


# Programs of their own: signals to a driver, and ranks that Ray starts again.

SMALL = (
    "--num-steps 6 --num-prompts 2 --group-size 4 --sampling.max-new-tokens 12 --save-every 2 --preflight warn "
    "--max-dead-steps 99 --validation-problems 0 --optim.lr 1e-2 --optim.warmup-steps 0"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small run of a tiny model, without its folder."""
    base = tmp_path_factory.mktemp("tiny") / "base"
    shape = replace(demo_policy().model, hidden_size=32, intermediate_size=64, head_dim=8)
    load_policy(replace(demo_policy(), model=shape, max_rows=64), seed=0).save(base)
    return ["rl", "demo", "--policy.init", str(base), *SMALL.split()]


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The last weights of the run in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    alone = start([*words, "--out", str(folder)])
    said = alone.communicate(timeout=240)[0]
    assert alone.returncode == 0, said[-2000:]
    return final(folder)


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "whet", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has logged a step."""
    end = time.monotonic() + 240
    while len(read_metrics(folder)) < step:
        assert process.poll() is None, process.communicate()[0][-2000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def final(folder: Path) -> bytes:
    return (folder / "checkpoints/step_00000006/model.safetensors").read_bytes()


COLLECTS_WHILE_RAY_ENDS = """
import threading, time
from whet.ranks.ray import open_ray

with open_ray("", cpus=1) as ray:
    refs = [ray.put(number) for number in range(2000)]
    worker = ray._private.worker.global_worker

    def collect():
        while ray.is_initialized():  # until it begins to end
            time.sleep(0.001)
        while refs and hasattr(worker, "core_worker"):
            garbage = [refs.pop()]  # each in a cycle, and enough others for the collector to run
            garbage.append(garbage)
            for _ in range(1000):
                garbage = []
                garbage.append(garbage)
            sum(range(20000))

    thread = threading.Thread(target=collect)
    thread.start()
thread.join()
print("the end")
"""


def test_references_that_another_thread_collects_while_ray_ends_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTS_WHILE_RAY_ENDS], capture_output=True, text=True)
    assert done.stdout == "the end\n", done.stderr[-2000:]
    assert done.returncode == 0


def test_a_driver_that_is_asked_to_stop_saves_and_goes_on_bit_by_bit(
    words: list[str], whole: bytes, tmp_path: Path
) -> None:
    ours = [*words, "--out", str(tmp_path / "run"), "--cluster.rollout-workers", "2"]
    driver = start(ours)
    until_step(tmp_path / "run", 2, driver)
    workers = actors(of=driver.pid)
    assert workers
    driver.send_signal(signal.SIGTERM)
    said = driver.communicate(timeout=120)[0]
    assert driver.returncode == 143, said[-2000:]
    assert not [process for process in workers if process.is_running()]
    steps = len(read_metrics(tmp_path / "run"))
    assert 2 <= steps < 6
    assert (tmp_path / f"run/checkpoints/step_{steps:08d}").is_dir(), said[-2000:]  # saved where it stopped
    again = start([*ours, "--resume"])
    said = again.communicate(timeout=240)[0]
    assert again.returncode == 0, said[-2000:]
    assert final(tmp_path / "run") == whole


def test_a_group_that_loses_its_rank_is_started_again_from_its_checkpoint(
    words: list[str], whole: bytes, tmp_path: Path
) -> None:
    more = ["--cluster.trainer-ranks", "1", "--cluster.rollout-workers", "1", "--cluster.max-restarts", "1"]
    driver = start([*words, "--out", str(tmp_path / "run"), *more])
    until_step(tmp_path / "run", 3, driver)
    (rank,) = [p for p in actors("config.yaml", of=driver.pid) if "whet" in p.cmdline()]
    rank.kill()
    said = driver.communicate(timeout=280)[0]
    assert driver.returncode == 0, said[-2000:]
    assert "started again from its last checkpoint (1 of 1)" in said
    assert [row["step"] for row in read_metrics(tmp_path / "run") if row["stage"] == "rl"] == list(
        range(1, 7)
    )
    assert final(tmp_path / "run") == whole
