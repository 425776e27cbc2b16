"""How a job of two ranks ends: one message, the right status, and soon, whatever happens to a rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import launch_ranks, make_store, start_alone, start_server

from whet.__main__ import run
from whet.ranks import launch
from whet.ranks.collectives import all_reduce_sum, barrier, on_main, rank
from whet.telemetry.heartbeat import birth
from whet.types import UserError


def work() -> int:
    print(f"rank {rank()} speaks", flush=True)
    assert all_reduce_sum(1.0) == [2.0]
    return 0


def stop() -> int:
    barrier()
    raise SystemExit(143)


def user_error_on_all() -> int:
    raise UserError("no such thing")


def user_error_on_one() -> int:
    if rank() == 1:
        raise UserError("no such thing")
    return work()


def user_error_on_main() -> int:
    def fail() -> None:
        raise UserError("no such thing")

    on_main(fail)
    return work()


def bug_on_one() -> int:
    if rank() == 1:
        raise ZeroDivisionError
    return work()


def killed() -> int:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return work()


def killed_in_an_exchange_of_pytorchs() -> int:
    barrier()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # A dying process' connections close a moment before the system says that it is gone.
    fate, shown = launch._fate, time.monotonic() + 0.4
    launch._fate = lambda process: fate(process) if time.monotonic() > shown else ""
    dist.all_reduce(torch.ones(1))
    return 0


def killed_while_busy() -> int:
    launch.GRACE_S = 1.0
    barrier()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def stopped() -> int:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return work()


def late() -> int:
    if rank() == 1:
        time.sleep(6)
    return work()


def asked_to_end() -> int:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return work()


def unequal() -> int:
    all_reduce_sum(*[1.0] * (1 + rank()))
    return 0


GONE = "whet: error: rank 1 is gone (killed?)"


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("function", "statuses", "said"),
    [
        (work, [0, 0], ""),
        (stop, [143, 143], ""),
        (user_error_on_all, [2, 2], "whet: error: no such thing"),
        (user_error_on_one, [1, 2], "whet: error: no such thing"),
        (user_error_on_main, [2, 2], "whet: error: no such thing"),
        (bug_on_one, [1, 1], "rank 1: Traceback"),
        (killed, [1, -9], GONE),
        (killed_while_busy, [1, -9], GONE),
        (killed_in_an_exchange_of_pytorchs, [1, -9], GONE),
        (
            stopped,
            [1, -9],
            "whet: error: rank 1 is stopped; rank 0 waited in all_reduce_sum of 1 values in test_launch",
        ),
        (
            late,
            [1, 1],
            "whet: error: rank 1 did not arrive; rank 0 waited in all_reduce_sum of 1 values in test_launch",
        ),
        (
            asked_to_end,
            [1, 143],
            "whet: error: terminated (SIGTERM); the same command with --resume continues",
        ),
        (
            unequal,
            [1, 1],
            "whet: error: ranks are in different collectives: rank 0: all_reduce_sum of 1 values",
        ),
    ],
)
def test_the_end_of_a_job(function, statuses: list[int], said: str, tmp_path: Path) -> None:
    start_server()
    began = time.monotonic()
    found = launch_ranks(tmp_path, function)
    assert time.monotonic() - began < 15 + 5  # the limit, and two forks on a busy machine
    assert [status for status, _ in found] == statuses, found
    output = "".join(text for _, text in found)
    lines = [line for line in output.splitlines() if line.startswith(("whet: ", "rank 0: ", "rank 1: "))]
    assert len(lines) == (said != ""), output
    assert said in output
    assert output.count("rank 0 speaks") <= 1
    assert "rank 1 speaks" not in output, "only rank 0 prints"


def test_ranks_that_are_started_again_do_not_hear_of_the_attempt_before(tmp_path: Path) -> None:
    """torchrun keeps the store: what the first attempt left in it ended the second one."""
    start_server()
    store = make_store()
    assert [status for status, _ in launch_ranks(tmp_path, killed, store=store)] == [1, -9]
    found = launch_ranks(tmp_path, work, store=store)
    assert [status for status, _ in found] == [0, 0], found


def ended(pid: int, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while birth(pid) is not None and time.monotonic() < end:
        time.sleep(0.05)
    return birth(pid) is None


def test_ranks_that_wait_for_each_other_end_with_torchrun(tmp_path: Path) -> None:
    start_server()
    store = make_store()  # outlives torchrun: here nothing else tells the rank
    torchrun, waiting = start_alone(tmp_path, store.port)
    assert not ended(waiting, 2.0)
    os.kill(torchrun, signal.SIGKILL)
    assert ended(waiting, 10.0)
    assert "whet: error: torchrun is gone while the ranks joined" in (tmp_path / "0").read_text()


def test_ranks_do_not_wait_for_a_store_that_is_gone(tmp_path: Path) -> None:
    start_server()
    port = make_store().port  # closed at once
    torchrun, waiting = start_alone(tmp_path, port)
    assert ended(waiting, 8.0)
    assert f"torchrun's store at 127.0.0.1:{port} does not answer" in (tmp_path / "0").read_text()
    assert ended(torchrun, 5.0)


def test_what_several_ranks_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="'whet explain' runs in one process"):
        run(["explain"])
