"""Ranks on two hosts: network namespaces with names and processes of their own, joined by one link."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from needs import require
from safetensors.torch import load_file

from whet.generate.policy import load_policy
from whet.recipes.models import demo_policy
from whet.telemetry.log import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # six starts of Python, on a busy machine
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29533


@dataclass(frozen=True)
class Host:
    """A network namespace with its name and address."""

    space: str
    name: str

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program there, in process and name spaces of its own; they end with it."""
        inside = f"hostname {self.name} && exec " + " ".join(f"'{word}'" for word in words)
        own = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside)
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.space, *own],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A rank imports, compiles and finds nothing but through these.
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )


def ip(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two hosts, each of which knows the other by name; skips where this machine's kernel or user allows none."""
    require("network namespaces")
    found = [Host(f"whet{os.getpid()}{letter}", f"host-{letter}") for letter in "ab"]
    folders = [Path("/etc/netns") / host.space for host in found]
    try:
        for host in found:
            made = ip(f"netns add {host.space}")
            assert made.returncode == 0, made.stderr
        one, other = (host.space for host in found)
        done = [ip(f"link add name eth0 netns {one} type veth peer name eth0 netns {other}")]
        for host, address, folder in zip(found, ADDRESSES, folders, strict=True):
            inside = f"-n {host.space}"
            done += [
                ip(f"{inside} addr add {address}/24 dev eth0"),
                ip(f"{inside} link set eth0 up"),
                ip(f"{inside} link set lo up"),
            ]
            folder.mkdir(parents=True)
            names = "".join(f"{a} {h.name}\n" for a, h in zip(ADDRESSES, found, strict=True))
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        assert [result.stderr.strip() for result in done if result.returncode] == []
        yield found
    finally:
        for host, folder in zip(found, folders, strict=True):
            ip(f"netns del {host.space}")
            shutil.rmtree(folder, ignore_errors=True)


def launch(
    hosts: Sequence[Host], words: Sequence[str], tmp_path: Path, *, restarts: int = 0
) -> list[subprocess.Popen[bytes]]:
    """Start torchrun on both hosts as docs/cluster/torchrun.sh does."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", "2", "--nproc-per-node", "1"]
    meet = ["--rdzv-id", "whet", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:{PORT}"]
    command = [*torchrun, *meet, "--max-restarts", str(restarts), "-m", "whet", *words]
    return [host.start(command, tmp_path / host.name) for host in hosts]


def ended(jobs: Sequence[subprocess.Popen[bytes]], tmp_path: Path) -> str:
    """Wait for both; return what both said, which must have ended well."""
    try:
        statuses = [job.wait(240) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("host-*")))
    assert statuses == [0, 0], said[-4000:]
    return said


def test_the_doctor_sees_both_hosts(hosts: list[Host], tmp_path: Path) -> None:
    said = ended(launch(hosts, ["doctor", "cluster", "--folder", str(tmp_path)], tmp_path), tmp_path)
    assert "host-a" in said
    assert "host-b" in said
    assert "gloo" in said


def test_a_host_that_loses_its_rank_starts_again_with_the_other(hosts: list[Host], tmp_path: Path) -> None:
    """Models in shards over both hosts; torchrun restarts the ranks, and they go on from the checkpoint bitwise."""
    base = tmp_path / "base"
    shape = replace(demo_policy().model, hidden_size=32, intermediate_size=64, head_dim=8)
    load_policy(replace(demo_policy(), model=shape, max_rows=64), seed=0).save(base)
    small = (
        "--num-steps 8 --batch-size 6 --num-problems 60 --save-every 2 --validation-problems 0 --optim.lr 1e-3 "
        "--parallel.kind fsdp"
    )
    words = ["sft", "demo", "--policy.init", str(base), *small.split()]
    whole, run = tmp_path / "whole", tmp_path / "run"
    ended(launch(hosts, [*words, "--out", str(whole)], tmp_path), tmp_path)

    jobs = launch(hosts, [*words, "--out", str(run)], tmp_path, restarts=1)
    end = time.monotonic() + 200
    while not (run / "checkpoints/step_00000002").is_dir():
        assert time.monotonic() < end, "no checkpoint came"
        assert all(job.poll() is None for job in jobs), (tmp_path / "host-a").read_text()[-2000:]
        time.sleep(0.02)
    below = psutil.Process(jobs[1].pid).children(recursive=True)
    (rank,) = [p for p in below if "whet" in p.cmdline() and not any("torchrun" in w for w in p.cmdline())]
    rank.kill()
    ended(jobs, tmp_path)
    steps = [row["step"] for row in read_metrics(run) if "sft/loss" in row]
    assert steps == list(range(1, 9))
    names = ["checkpoints/step_00000008/model.safetensors" for _ in range(2)]
    one, other = (load_file(folder / name) for folder, name in zip((whole, run), names, strict=True))
    assert all(one[name].equal(other[name]) for name in one)
    assert json.loads((run / "environment.json").read_bytes())["environment"]["TORCHELASTIC_RUN_ID"] == "whet"
