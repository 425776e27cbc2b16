"""Functions run by several ranks at once: forks of a server that has loaded torch already."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed.checkpoint.hf_storage",
        "torch.distributed.checkpoint.state_dict_loader",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.distributed.fsdp",
        "torch._dynamo",  # what FSDP imports when it shards
        "pytest",
        "whet.ranks.launch",
        "whet.storage.checkpoint",
        "whet.train.rl",
        "whet.train.sft",
    ]
)


def start_server() -> None:
    """Wait until the server has loaded torch, so that no test counts that time as its ranks'."""
    process = _context.Process(target=int)
    process.start()
    process.join()


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what each rank's call returned; an error is returned as (name of its class, text)."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            _context.Process(
                target=_be_rank, args=(folder, rank, num_ranks, pipes[rank][1], function, arguments)
            )
            for rank in range(num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            results = [pipe.recv() if pipe.poll(60) else ("hung", "") for pipe, _ in pipes]
            for process in ranks:
                process.join(20)
        finally:
            for process in ranks:
                process.kill()
    return results


def _be_rank(
    folder: str,
    rank: int,
    num_ranks: int,
    pipe: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if num_ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=20),
            )
        result = function(*arguments)
        if num_ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        result = (type(error).__name__, str(error))
    pipe.send(result)
    os._exit(0)


def make_store() -> TCPStore:
    """Return the store that torchrun holds, for all attempts of a job."""
    return TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)


def launch_ranks(
    folder: Path, function: Callable[[], int], *, store: TCPStore | None = None, limit_s: float = 20.0
) -> list[tuple[int | None, str]]:
    """Run `whet.ranks.launch.run_rank` in two processes, as torchrun would; return exit status and stderr of each."""
    store = make_store() if store is None else store
    ranks = [
        _context.Process(target=_launch, args=(str(folder / f"{rank}"), rank, store.port, function))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(limit_s)
    found = [(process.exitcode, (folder / f"{rank}").read_text()) for rank, process in enumerate(ranks)]
    for process in ranks:
        process.kill()
    return found


def _launch(output: str, rank: int, port: int, function: Callable[[], int]) -> None:
    import torch

    from whet.ranks.launch import run_rank

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WHET_COLLECTIVE_TIMEOUT_S": "3"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    run_rank(function, os.getppid())


def start_alone(folder: Path, port: int) -> tuple[int, int]:
    """Start rank 0 of two that never meet, below a stand-in for torchrun; return the process ids of both.

    Args:
        folder: Gets rank 0's output, as the file `0`.
        port: Of the store.
    """
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_start_alone, args=(str(folder / "0"), port, theirs))
    process.start()
    assert process.pid is not None
    return process.pid, ours.recv()


def _start_alone(output: str, port: int, pipe: Any) -> None:
    pid = os.fork()
    if not pid:
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
        _launch(output, 0, port, int)
    pipe.send(pid)
    os.waitpid(pid, 0)
