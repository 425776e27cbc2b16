"""The grader pool: deadlines, memory, death at any place, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late import wait_for
from needs import needs

from whet.sandbox.graders.graders import GraderPool
from whet.sandbox.graders.server import plain_number
from whet.types import Problem, UserError

GRADERS = """
import asyncio, ctypes, os, subprocess, sys, time
from whet.types import Problem

TABLE = []

def prepare():
    TABLE.append(os.getpid())

def double(x):
    return 2 * x

def hang_below(x, limit):
    if x < limit:
        while True:
            pass
    return x

def fork(x):
    os.fork()
    return x

def slow(seconds):
    time.sleep(seconds)
    return "done"

def where():
    return [os.getpid(), os.getppid(), TABLE]

async def later(x):
    await asyncio.sleep(0.01)
    return x + 1

def length(problem, completion):
    assert isinstance(problem, Problem), type(problem)
    return [len(completion), problem.answer, problem.meta["level"]]

def work(how, seconds):
    began = time.monotonic()
    if how == "waits":
        time.sleep(seconds)
    elif how == "computes":
        while time.monotonic() - began < seconds:
            pass
    else:
        subprocess.run(["sleep", str(seconds)])
    return os.getpid()

def eat(mib):
    return len(bytearray(mib << 20))

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError

def misbehave(how):
    if how == "raise":
        raise KeyError("no such\\nkey")
    if how == "exit":
        sys.exit(3)
    if how == "unprintable":
        raise Unprintable
    if how == "die":
        os._exit(7)
    if how == "crash":
        ctypes.string_at(0)
    if how == "recurse":
        return misbehave(how)
    if how == "close":
        os.closerange(3, 100)
        time.sleep(100)
    if how == "object":
        return object()
    if how == "huge":
        return "x" * (1 << 21)
    if how == "nan":
        return float("nan")
    if how == "print":
        print('1 {"kind": "ok", "value": "forged", "message": "", "seconds": 0}', flush=True)
        return "printed"
    if how in ("forge", "forge a part", "forge no JSON"):
        line = {
            "forge": b'0 {"kind": "ok", "value": "forged", "message": "", "seconds": 0}',
            "forge a part": b'1 {"kind": "ok", "value": "forged"}',
            "forge no JSON": b"1 forged",
        }[how]
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, line + b"\\n")
            except OSError:
                pass
    if how == "stdin":
        return input()
    return how

LEAK = []

def leak(mib):
    LEAK.append(bytearray(mib << 20))
    return len(LEAK)

def kill_server(x):
    os.kill(os.getppid(), 9)
    time.sleep(10)

def kill_server_once(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second time"
    kill_server(0)

def spawn_and_hang():
    child = subprocess.Popen(["sleep", "1000"])
    sys.stderr.write(f"child {child.pid}\\n")
    open(os.environ["CHILD_FILE"], "w").write(str(child.pid))
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("graders")
    (folder / "graders.py").write_text(GRADERS)
    return lambda name: f"{folder / 'graders.py'}:{name}"


@pytest.fixture
def pool(spec: Callable[[str], str]) -> Iterator[Callable[..., GraderPool]]:
    pools: list[GraderPool] = []

    def make(name: str, **options: Any) -> GraderPool:
        pools.append(GraderPool(spec(name), **options))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def is_gone(pid: int, patience_s: float = 10.0) -> bool:
    """Say whether a process ends in time; a zombie that nobody reaps counts as gone."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def with_server(make: Callable[..., GraderPool], name: str, **options: Any) -> tuple[GraderPool, int]:
    """Make a pool, and find its server: the child of the keeper, which is this process's."""
    before = children(os.getpid())
    graders = make(name, **options)
    (keeper,) = set(children(os.getpid())) - set(before)
    (server,) = children(keeper)
    return graders, server


@needs("linux")
@pytest.mark.parametrize(("how", "most"), [("waits", 16), ("computes", 1), ("has a child", 1)])
def test_calls_that_wait_for_a_service_leave_their_place(
    how: str, most: int, pool: Callable[..., GraderPool]
) -> None:
    """A reward that asks a service is asked 16 times at once on one core; one that computes is not."""
    seconds = 1.0 if how == "waits" else 0.2
    graders = pool("work", num_workers=1, max_workers=16, deadline_s=60.0)
    outcomes = graders.map([(how, seconds)] * (16 if how == "waits" else 4))
    assert all(outcome.kind == "ok" for outcome in outcomes)
    assert len({outcome.value for outcome in outcomes}) == most


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_outcomes_come_in_the_order_of_the_calls(pool: Callable[..., GraderPool]) -> None:
    """The first calls are the slowest: arrival is the reverse of the order asked for."""
    assert [o.value for o in pool("double").map([(i,) for i in range(200)])] == list(range(0, 400, 2))
    waits = [0.3, 0.15, 0.0]
    outcomes = pool("slow", num_workers=3).map([(wait,) for wait in waits])
    assert [round(o.seconds - wait, 0) for o, wait in zip(outcomes, waits, strict=True)] == [0, 0, 0]
    assert outcomes[0].seconds > outcomes[1].seconds > outcomes[2].seconds
    assert {(o.kind, o.value, o.message) for o in outcomes} == {("ok", "done", "")}
    assert pool("double").map([]) == []


@pytest.mark.some(1)
@pytest.mark.parametrize("hanging", [range(10), range(54, 64), range(0, 60, 6)])
def test_ten_hanging_calls_of_64_cost_one_deadline(pool: Callable[..., GraderPool], hanging: range) -> None:
    graders = pool("hang_below", deadline_s=1.0, num_workers=2)
    started = time.monotonic()
    outcomes = graders.map([(i, 64 if i in hanging else 0) for i in range(64)])
    assert time.monotonic() - started < 4.5  # ten deadlines on two workers are 5 s
    assert [i for i, outcome in enumerate(outcomes) if outcome.kind == "timeout"] == list(hanging)
    assert all(o.value == i for i, o in enumerate(outcomes) if i not in hanging)
    assert all(1.0 <= outcomes[i].seconds < 4.0 and outcomes[i].value is None for i in hanging)


def test_a_grader_that_forks_answers_once(pool: Callable[..., GraderPool]) -> None:
    outcomes = pool("fork", num_workers=1).map([(number,) for number in range(20)])
    assert [outcome.value for outcome in outcomes] == list(range(20))


def test_no_more_than_max_workers(pool: Callable[..., GraderPool]) -> None:
    """Six calls that all hang, three at once: two rounds of the deadline, and one worker cannot do it faster."""
    graders = pool("slow", deadline_s=0.4, num_workers=1, max_workers=3)
    started = time.monotonic()
    assert {o.kind for o in graders.map([(9.0,)] * 6)} == {"timeout"}
    assert time.monotonic() - started >= 0.8


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", "error", "KeyError: 'no such\\nkey' (graders.py:"),
        ("exit", "error", "SystemExit: 3"),
        ("unprintable", "error", "Unprintable: (its message"),
        ("die", "error", "ended before it answered (exit status 7)"),
        ("crash", "error", "ended before it answered (signal 11: Segmentation fault)"),
        ("close", "error", "ended before it answered (signal 9"),
        ("recurse", "error", "RecursionError: maximum recursion depth"),
        ("object", "error", "the grader returned a object: expected float, int, bool, None, str"),
        ("huge", "error", "the grader returned 2097154 characters"),
        ("stdin", "error", "EOFError"),
        ("forge", "error", "the grader wrote into its own result channel"),
        ("forge a part", "error", "the grader wrote into its own result channel"),
        ("forge no JSON", "error", "the grader wrote into its own result channel"),
        ("fine", "ok", ""),
        ("print", "ok", ""),
    ],
)
def test_a_misbehaving_grader_is_an_outcome(
    misbehaving: GraderPool, how: str, kind: str, message: str
) -> None:
    before, outcome, after = misbehaving.map([("a",), (how,), ("b",)])
    assert (before.value, after.value) == ("a", "b")
    assert (outcome.kind, "\n" in outcome.message) == (kind, False)
    assert message in outcome.message
    assert outcome.value == ({"print": "printed"}.get(how, how) if kind == "ok" else None)


@pytest.fixture(scope="module")
def misbehaving(spec: Callable[[str], str]) -> Iterator[GraderPool]:
    with GraderPool(spec("misbehave"), num_workers=1) as graders:
        yield graders


def test_not_a_number_arrives(misbehaving: GraderPool) -> None:
    """Whether it is a good reward is for the caller to say: it must not be taken for a crash."""
    (outcome,) = misbehaving.map([("nan",)])
    assert outcome.value != outcome.value


def test_memory_limit(pool: Callable[..., GraderPool]) -> None:
    graders = pool("eat", memory_mib=128, num_workers=1)
    kinds = [outcome.kind for outcome in graders.map([(50,), (500,), (50,), (10**6,), (50,)])]
    assert kinds == ["ok", "memory", "ok", "memory", "ok"]


def test_a_worker_that_grows_is_replaced_before_it_fails(pool: Callable[..., GraderPool]) -> None:
    outcomes = pool("leak", memory_mib=128, num_workers=1).map([(20,)] * 12)
    assert {outcome.kind for outcome in outcomes} == {"ok"}
    assert max(outcome.value for outcome in outcomes) < 6


def test_problems_arrive_as_problems_and_coroutines_are_awaited(pool: Callable[..., GraderPool]) -> None:
    problem = Problem(uid="u", task="t", prompt="p", answer="\ud800 ½", meta={"level": "3"})
    (outcome,) = pool("length").map([(problem, "text\n\x00")])
    assert (outcome.value, outcome.message) == ([6, "\ud800 ½", "3"], "")
    assert [o.value for o in pool("later").map([(1,), (2,)])] == [2, 3]
    with pytest.raises(TypeError):
        pool("double").map([(object(),)])


def test_prepare_runs_once_in_the_server(pool: Callable[..., GraderPool], spec: Callable[[str], str]) -> None:
    graders = pool("where", prepare=spec("prepare"), num_workers=1)
    (outcome,) = graders.map([()])
    worker, server, prepared = outcome.value
    assert prepared == [server]
    assert server not in (worker, os.getpid())
    with pytest.raises(UserError, match="failed: TypeError"):
        pool("where", prepare=spec("double"))


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    """Python's cache would take an edit of the same length within a second for none."""
    file, found = tmp_path / "mine.py", []
    for number in (1, 2):
        file.write_text(f"def grade(x):\n    return {number}\n")
        os.utime(file, (1e9, 1e9))
        with GraderPool(f"{file}:grade", num_workers=1) as graders:
            found += [outcome.value for outcome in graders.map([(0,)])]
    assert found == [1, 2]
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_may_import_its_neighbours_and_a_module_is_named_by_dots(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import helper\ndef grade():\n    return helper.NUMBER\n")
    (tmp_path / "helper.py").write_text("NUMBER = 17\n")
    with GraderPool(f"{tmp_path}/mine.py:grade") as graders:
        assert graders.map([()])[0].value == 17
    with GraderPool("whet.rewards.answers.extract:extract_answer") as graders:
        assert graders.map([("#### 12",)])[0].value == "12"


def test_usable_from_several_threads(pool: Callable[..., GraderPool]) -> None:
    graders = pool("double")
    wrong: list[int] = []

    def work(first: int) -> None:
        calls = [(i,) for i in range(first, first + 100)]
        for _ in range(3):
            wrong.extend(i for (i,), o in zip(calls, graders.map(calls), strict=True) if o.value != 2 * i)
        done.append(first)

    done: list[int] = []
    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, len(done)) == ([], 6)


def test_the_server_may_die(pool: Callable[..., GraderPool], tmp_path: Path) -> None:
    graders = pool("kill_server_once", num_workers=1)
    assert [o.value for o in graders.map([(str(tmp_path / "mark"),)] * 3)] == ["second time"] * 3
    graders = pool("where", num_workers=1)
    for _ in range(3):
        _, server, _ = graders.map([()])[0].value
        os.kill(server, signal.SIGKILL)
    (outcome,) = pool("kill_server", num_workers=1).map([(0,)])
    assert (outcome.kind, "server died 2 times" in outcome.message) == ("error", True)


def test_a_killed_server_takes_a_hanging_worker_along(pool: Callable[..., GraderPool]) -> None:
    graders, server = with_server(pool, "slow", deadline_s=60.0, num_workers=1)
    thread = threading.Thread(target=lambda: pytest.raises(RuntimeError, graders.map, [(50.0,)]))
    thread.start()
    (worker,) = wait_for(lambda: children(server))
    time.sleep(0.5)  # until it runs the call
    os.kill(server, signal.SIGKILL)
    assert is_gone(worker)
    graders.close()
    thread.join(10)


def test_prints_go_to_standard_error(
    pool: Callable[..., GraderPool], capfd: pytest.CaptureFixture[str]
) -> None:
    assert pool("misbehave").map([("print",)])[0].value == "printed"
    out, err = capfd.readouterr()
    assert (out, "forged" in err) == ("", True)


def test_a_killed_trainer_takes_everything_along(spec: Callable[[str], str]) -> None:
    """Also while a worker hangs, and though a forked child of the trainer still holds the sockets."""
    code = f"""
import os, sys, threading, time
from whet.sandbox.graders.graders import GraderPool
graders = GraderPool({spec("hang_below")!r}, deadline_s=60.0, num_workers=1)
threading.Thread(target=graders.map, args=([(0, 1)],), daemon=True).start()
time.sleep(0.5)
if os.fork() == 0:
    time.sleep(8)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    trainer.stdout.readline()
    below = children(trainer.pid)
    keepers = [pid for pid in below if "graders/worker.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(keepers) == 1
    servers = children(keepers[0])
    assert len(servers) == 1
    workers = children(servers[0])
    assert len(workers) == 1
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert is_gone(keepers[0], 6.0)
    assert is_gone(servers[0], 6.0)
    assert is_gone(workers[0], 6.0)


def test_a_killed_worker_takes_its_subprocesses_along(
    pool: Callable[..., GraderPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "child"))
    (outcome,) = pool("spawn_and_hang", deadline_s=1.0).map([()])
    assert outcome.kind == "timeout"
    assert is_gone(int((tmp_path / "child").read_text()))


def test_close_and_interruption(pool: Callable[..., GraderPool]) -> None:
    graders = pool("slow", deadline_s=60.0, num_workers=1)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            graders.map([(50.0,)])
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    graders.close()
    thread.join(10)
    assert [str(error) for error in errors] == ["this grader pool is closed"]
    graders.close()


def test_an_interrupted_batch_frees_its_workers(pool: Callable[..., GraderPool]) -> None:
    """Ctrl-C inside `map` must not leave its calls running before those of the next one."""
    graders = pool("slow", deadline_s=60.0, num_workers=1, max_workers=1)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            graders.map([(50.0,)] * 5)
    finally:
        signal.signal(signal.SIGALRM, previous)
    started = time.monotonic()
    assert graders.map([(0.0,)])[0].value == "done"
    assert time.monotonic() - started < 20


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def num_descriptors(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.ci
def test_a_thousand_kills_leave_nothing(pool: Callable[..., GraderPool]) -> None:
    graders, server = with_server(pool, "misbehave", num_workers=2)
    graders.map([("die",)] * 4 + [("fine",)] * 4)
    before = num_descriptors("self"), num_descriptors(server)
    for _ in range(10):
        assert {outcome.kind for outcome in graders.map([("die",)] * 100)} == {"error"}
    assert [outcome.value for outcome in graders.map([("fine",)] * 4)] == ["fine"] * 4
    assert num_descriptors("self") == before[0]
    assert num_descriptors(server) <= before[1] + 4
    assert len(children(server)) <= 4
    graders.close()
    assert is_gone(server)


def test_workers_killed_at_their_deadline_are_reaped(pool: Callable[..., GraderPool]) -> None:
    graders, server = with_server(pool, "slow", deadline_s=0.2, num_workers=2)
    assert {outcome.kind for outcome in graders.map([(9.0,)] * 6)} == {"timeout"}
    assert wait_for(lambda: not children(server))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rewards.py", r"grader 'rewards.py': expected 'path/to/file.py:function'"),
        ("a b:c", "expected 'path/to/file.py:function'"),
        ("{}/none.py:f", "there is no file"),
        ("{}/graders.py:dubble", "has no function 'dubble'; it has double, "),
        ("{}/graders.py:__name__", "has no function '__name__'"),
        ("{}/broken.py:f", r"importing .*broken.py failed: ZeroDivisionError: .* \(broken.py:2\)"),
        ("{}/syntax.py:f", r"importing .*syntax.py failed: SyntaxError: .*line 1"),
        ("{}/leaves.py:f", "importing .*leaves.py failed: SystemExit: 1"),
        ("{}/dies.py:f", "its process died while importing it"),
        ("no_such_package.part:f", "importing no_such_package.part failed: ModuleNotFoundError"),
        (
            "whet.rewards.answers.extract:nothing",
            "whet.rewards.answers.extract has no function 'nothing'; it has ",
        ),
    ],
)
def test_what_cannot_be_had_is_said_at_once(tmp_path: Path, function: str, message: str) -> None:
    (tmp_path / "graders.py").write_text("def double(x): return x\ndef other(x): return x\n")
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "syntax.py").write_text("def (\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(1)\n")
    (tmp_path / "dies.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(UserError, match=message) as caught:
        GraderPool(function.format(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"deadline_s": 0.0}, {"memory_mib": 0}, {"num_workers": -1}, {"num_workers": 9, "max_workers": 8}],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], spec: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(options))} = .*: expected"):
        GraderPool(spec("double"), **options)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    for value in (np.float32(0.5), np.array(0.5), torch.tensor(0.5), 0.5):
        assert type(plain_number(value)) is float
        assert plain_number(value) == 0.5
    assert plain_number(np.bool_(True)) is True
    assert [plain_number(value) for value in (np.int64(3), "3", None)] == [3, "3", None]
    several = np.array([1.0])
    assert plain_number(several) is several  # refused, with a name, as before


@pytest.mark.parametrize(
    ("limit", "value"),
    [("set_int_max_str_digits(0)", "10**50_000"), ("setrecursionlimit(10**6)", "deep()")],
)
def test_a_file_that_lifts_pythons_limits_is_an_outcome(tmp_path: Path, limit: str, value: str) -> None:
    """Then the server, which imports the file, too, can read what this process cannot."""
    path = tmp_path / "mine.py"
    path.write_text(
        f"import sys\nsys.{limit}\n"
        "def deep():\n    x = []\n    for _ in range(60_000):\n        x = [x]\n    return x\n"
        f"def grade(x):\n    return {value} if x else 1\n"
    )
    with GraderPool(f"{path}:grade", num_workers=1) as graders:
        (bad,), (good,) = graders.map([(1,)]), graders.map([(0,)])
    assert (bad.kind, good.kind, good.value) == ("error", "ok", 1)
    assert "\n" not in bad.message
