"""Processes on other machines, or on this one, started by Ray: its settings, a local cluster, and groups of ranks.

A group of ranks is what torchrun would start: one process per rank with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT in its environment (`whet.ranks.launch` joins them). Ray chooses the machines, carries signals and output,
and notices what dies.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

from whet import processes
from whet.install import install_command
from whet.types import UnreadError, UserError

ADDRESS, MODE, TOKEN = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
LOCAL = {
    # Ray's head listens for commands: without a token anybody who reaches it runs code here.
    MODE: "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of a cluster of this machine alone."""
STORE_BYTES = 1 << 28
"""Least memory of a local cluster's object store."""
PLACE_S = 600.0
"""Seconds that a group waits for its machines."""
SILENT_S = 60.0
"""Seconds after which a rank that does not answer counts as lost."""
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Processes that share a run's work, started by Ray (extra `ray`), on this machine or on a cluster."""

    rollout_workers: int = 0
    """Processes that sample, beside the one that trains; 0 samples in that one."""
    trainer_ranks: int = 0
    """Processes that train, as torchrun would start them, each with its share of the rollout workers; 0 trains in the
    process that was started."""
    address: str = ""
    """Ray cluster to join, such as auto or HOST:6379; empty for RAY_ADDRESS, or a local one that ends with the run."""
    min_workers: int = 1
    """Rollout workers per trainer rank without which nothing is sampled; the others join when the cluster has room."""
    wait_s: float = 600.0
    """Seconds with fewer than min_workers after which the run stops."""
    worker_threads: int = 1
    """CPU threads of each rollout worker, and the CPUs that it asks Ray for."""
    worker_gpus: float = 0.0
    """GPUs, or share of one, that each rollout worker asks Ray for."""
    slow_factor: float = 4.0
    """A rollout worker that takes this many times the median for its share of work is late: an idle one repeats it."""
    partial: bool = False
    """Continue the sequences that a weight update finds unfinished with the new weights, instead of finishing them with
    the old ones (with off_policy.staleness); each token keeps the log-probability that it was drawn with."""
    reward_workers: int = 0
    """Processes that judge answers and compute the run's own rewards (reward), over all ranks; 0 grades where the
    trainer runs."""
    trainer_threads: int = 1
    """CPUs that each trainer rank asks Ray for."""
    trainer_gpus: float = 0.0
    """GPUs that each trainer rank asks Ray for."""
    max_restarts: int = 0
    """Times that a group of ranks is started again from its last checkpoint after one of them failed."""

    def __post_init__(self) -> None:
        for name in (
            "rollout_workers",
            "trainer_ranks",
            "reward_workers",
            "worker_gpus",
            "trainer_gpus",
            "max_restarts",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"cluster.{name} = {getattr(self, name)}: expected 0 or more")
        for name in ("min_workers", "worker_threads", "trainer_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"cluster.{name} = {getattr(self, name)}: expected 1 or more")
        if not self.wait_s > 0:
            raise ValueError(f"cluster.wait_s = {self.wait_s}: expected seconds, above 0")
        if not self.slow_factor >= 1:
            raise ValueError(f"cluster.slow_factor = {self.slow_factor}: expected 1 or more")
        readers = {
            "rollout_workers": (
                *("min_workers", "wait_s", "worker_threads", "worker_gpus", "slow_factor", "partial"),
            ),
            "trainer_ranks": ("trainer_threads", "trainer_gpus", "max_restarts"),
        }
        defaults = {field.name: field.default for field in fields(self)}
        for reader, names in readers.items():
            for name in names:
                if not getattr(self, reader) and getattr(self, name) != defaults[name]:
                    raise UnreadError(
                        f"cluster.{name} is read with cluster.{reader} only; leave it out", name
                    )
        if self.address and not (self.rollout_workers or self.trainer_ranks or self.reward_workers):
            raise UnreadError(
                "cluster.address is read with cluster.rollout_workers, trainer_ranks or reward_workers; leave it out",
                "address",
            )
        for name in ("rollout_workers", "reward_workers"):
            if self.trainer_ranks and 0 < (count := getattr(self, name)) < self.trainer_ranks:
                raise ValueError(
                    f"cluster.{name} = {count} for {self.trainer_ranks} trainer ranks: each has its own; expected as "
                    "many or more, or 0"
                )
        if self.rollout_workers and self.min_workers > self.rollout_workers:
            raise ValueError(
                f"cluster.min_workers = {self.min_workers}: expected at most rollout_workers = {self.rollout_workers}"
            )


def load_ray() -> Any:
    """Import Ray.

    Raises:
        UserError: If it is not installed, or finds AMD's package without AMD's library.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(f"cluster.* needs Ray: {install_command('ray')} ({error})") from None
    except KeyError as error:  # that of amdsmi, which it imports to look for GPUs
        if "amd_smi" not in str(error):
            raise
        raise UserError(
            "cluster: Ray does not start, since the package amdsmi is installed and ROCm's libamd_smi.so is not found: "
            "pip uninstall amdsmi, or set ROCM_PATH to where ROCm is"
        ) from None
    return ray


def find_address(config: ClusterConfig) -> str:
    """Return the cluster to join; '' for a local one."""
    return os.environ.get(ADDRESS, "") or config.address


_num_users = 0
"""Contexts of `open_ray` that have not ended: Ray is one for the whole process."""
_started = ExitStack()
"""Ends the Ray that the first of them started or joined; empty if it was there before."""


@contextmanager
def open_ray(address: str, *, cpus: float, gpus: float = 0.0, store_bytes: int = 0) -> Iterator[Any]:
    """Join a Ray cluster, or start a local one; it is left, or ends, with the last such context, or with this process.

    Args:
        address: The cluster; '' for a local one.
        cpus: CPUs that a local one claims to have at least: processes that wait for each other share the real ones.
        gpus: GPUs that a local one has to have.
        store_bytes: Memory of a local one's object store, at least.

    Yields:
        The module `ray`, connected.

    Raises:
        UserError: If Ray is missing, or there is no such cluster.
    """
    global _num_users
    if not address:
        os.environ.update({name: os.environ.get(name, value) for name, value in LOCAL.items()})
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
    was_imported = "ray" in sys.modules
    ray = load_ray()
    if not ray.is_initialized():
        if was_imported and not address:  # it read the environment when it was imported
            with suppress(ImportError, AttributeError):
                from ray._raylet import (  # pyright: ignore[reportMissingImports] - no part of its interface
                    AuthenticationTokenLoader,
                    Config,
                )

                Config.initialize("")
                AuthenticationTokenLoader.instance().reset_cache()
        _started.enter_context(_start(ray, address, cpus, gpus, store_bytes))
    _num_users += 1
    try:
        yield ray
    finally:
        # Not with the one that started it: rollout workers end before the graders of samples that are still drawn,
        # and a call of Ray without a cluster, even to kill an actor, starts a new one.
        _num_users -= 1
        if not _num_users:
            _started.close()


@contextmanager
def _start(ray: Any, address: str, cpus: float, gpus: float, store_bytes: int) -> Iterator[None]:
    """Join a cluster or start a local one; leave or end it."""
    told: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "whet"}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if not address:
        told |= {
            "num_cpus": max(int(-(-cpus // 1)), os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": max(STORE_BYTES, store_bytes),
            "_node_ip_address": "127.0.0.1",
        }
    try:
        ray.init(address=address or "local", **told)
    except Exception as error:  # Ray's own is a bare one where its parts do not start in time
        where = f"the Ray cluster {address} cannot be joined" if address else "Ray cannot be started here"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"cluster: {where}: {reason[:300]}") from None
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():  # Ray's own ends the process without saving
            signal.signal(number, handler)
    watcher = None if address else _watch_over(ray)
    try:
        found = ray.cluster_resources().get("GPU", 0.0)
        if gpus > found and not address:
            raise UserError(f"cluster: {gpus:g} GPUs are asked for, this machine has {found:g}")
        yield
    finally:
        with _no_collector():
            ray.shutdown()
        if watcher is not None:
            watcher.communicate()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Keep Python's garbage collector off in all threads.

    Ray ends the process, with status 1 and without a word, if one of its references is freed between the end of its
    core worker and the moment at which `ray.shutdown` forgets it, which is 5 ms later if another thread computes then.
    An actor's death leaves such references in cycles, through the exception that `ray.get` raised, and the collector
    frees them in whatever thread allocates: the one that writes the last checkpoint. Freed later, they do nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


WATCHER = """
import os, signal, sys, time
sys.stdin.read()  # ends when the process that started Ray does, however that is
folder, me = sys.argv[1].encode(), os.getpid()
for _ in range(20):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{name}/cmdline", "rb").read()
            words += open(f"/proc/{name}/environ", "rb").read()
        except OSError:
            continue
        if folder in words and int(name) != me:
            found.append(int(name))
    if not found:
        break
    time.sleep(0.5)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
"""
"""Kills what is left of a local cluster after its driver: a driver that is killed leaves agents of Ray behind."""


def _watch_over(ray: Any) -> subprocess.Popen[bytes] | None:
    """Start what cleans up after a local cluster; None where there is no /proc to find its processes in."""
    if not Path("/proc/self/environ").exists():
        return None
    # The name of the session's folder is unique to this cluster, and in the command line of each of its processes.
    folder = Path(ray._private.worker._global_node.get_session_dir_path()).name
    return subprocess.Popen(
        [sys.executable, "-S", "-c", WATCHER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


# Groups of ranks.


class RankProcess:
    """One rank: an actor that runs a program in a process of its own, and passes on what it writes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._written: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._files: Any = None

    def where(self) -> tuple[str, str, int, list[str]]:
        """Return this rank's node, its address, a port that is free there, and the GPUs that it was given."""
        ray = load_ray()
        context = ray.get_runtime_context()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return (
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            port,
            list(map(str, ray.get_gpu_ids())),
        )

    def start(self, words: Sequence[str], files: Mapping[str, str], environment: Mapping[str, str]) -> int:
        """Start the program; return its process id.

        Args:
            words: What follows `python -m whet`; '{folder}' stands for where the files are.
            files: Small files that it reads, by name.
            environment: What is added to the environment.
        """
        ray = load_ray()
        self._files = tempfile.TemporaryDirectory(prefix="whet-rank-")
        folder = self._files.name
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        address = ray.get_runtime_context().gcs_address
        self._process = processes.start(
            [sys.executable, "-m", "whet", *(word.replace("{folder}", folder) for word in words)],
            # A dead rank is told in one line by the others, not in stacks of C++ frames.
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, ADDRESS: address, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            reader = threading.Thread(target=self._read, args=(number, pipe), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self._process.pid

    def _read(self, number: int, pipe: Any) -> None:
        while data := pipe.read1(1 << 16):
            with self._lock:
                self._written.append((number, data))

    def take(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return what was written since the last call, and the exit status, None before the end."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            for reader in self._readers:
                reader.join(5.0)
        with self._lock:
            written, self._written = self._written, []
        return written, status

    def signal(self, number: int) -> None:
        """Send the program a signal."""
        if self._process is not None:
            self._process.send_signal(number)


def run_group(
    config: ClusterConfig, words: Sequence[str], files: Mapping[str, str], *, resume: Sequence[str]
) -> int:
    """Run a program on several ranks; return the exit status of the group.

    Args:
        config: How many ranks, and what each of them asks for.
        words: What follows `python -m whet`; '{folder}' stands for where the files are.
        files: Small files that it reads, by name.
        resume: What is added to the words when the group is started again.

    Raises:
        UserError: If there is no such cluster, or no room on it.
    """
    count = config.trainer_ranks
    cpus = count * config.trainer_threads + config.rollout_workers * config.worker_threads
    cpus += config.reward_workers
    gpus = count * config.trainer_gpus + config.rollout_workers * config.worker_gpus
    with open_ray(find_address(config), cpus=cpus, gpus=gpus) as ray:
        for attempt in range(config.max_restarts + 1):
            status, was_asked = _Group(ray, config).run([*words, *(resume if attempt else ())], files)
            if not status or was_asked or attempt == config.max_restarts:
                return status
            print(
                f"whet: the group of {count} ranks failed (exit status {status}); started again from its last "
                f"checkpoint ({attempt + 1} of {config.max_restarts})",
                file=sys.stderr,
                flush=True,
            )
    raise AssertionError


class _Group:
    """Ranks that are started together and end together."""

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        self._ray, self._config = ray, config
        self._asked: list[int] = []

    def run(self, words: Sequence[str], files: Mapping[str, str]) -> tuple[int, bool]:
        """Run a program; return the first exit status that is not 0, and whether a signal asked it to stop."""
        ray, count = self._ray, self._config.trainer_ranks
        bundle = {"CPU": float(self._config.trainer_threads), "GPU": self._config.trainer_gpus}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        group = ray.util.placement_group([bundle] * count, strategy="PACK")
        actors: list[Any] = []
        try:
            if not group.wait(PLACE_S):
                raise UserError(
                    f"cluster.trainer_ranks = {count}: no room for {bundle} each on the cluster within {PLACE_S:g} s "
                    "(ray status)"
                )
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            remote = ray.remote(RankProcess)
            actors = [
                remote.options(
                    num_cpus=bundle["CPU"],
                    num_gpus=self._config.trainer_gpus,
                    max_concurrency=4,
                    scheduling_strategy=place(group, placement_group_bundle_index=index),
                ).remote()
                for index in range(count)
            ]
            # Ranks of one node stand together, as torchrun numbers them.
            found = ray.get([actor.where.remote() for actor in actors], timeout=PLACE_S)
            order = sorted(
                range(count), key=lambda index: (found[index][0] != found[0][0], found[index][0], index)
            )
            actors, found = [actors[index] for index in order], [found[index] for index in order]
            started = [
                actor.start.remote(list(words), dict(files), environment)
                for actor, environment in zip(actors, environments(found), strict=True)
            ]
            ray.get(started, timeout=PLACE_S)
            with self._signals():
                return self._follow(actors), bool(self._asked)
        finally:
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)

    def _follow(self, actors: Sequence[Any]) -> int:
        """Pass on what the ranks write and what they are sent, until all have ended; return the group's status."""
        ray, told = self._ray, 0
        left, first = dict(enumerate(actors)), 0
        while left:
            for number in self._asked[told:]:
                for actor in left.values():
                    actor.signal.remote(number)
            told = len(self._asked)
            for index, actor in list(left.items()):
                try:
                    written, status = ray.get(actor.take.remote(), timeout=SILENT_S)
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                    print(
                        f"whet: error: rank {index} is lost, and perhaps its machine",
                        file=sys.stderr,
                        flush=True,
                    )
                    written, status = [], 1
                for stream, data in written:
                    out = sys.stdout if stream == 1 else sys.stderr
                    out.buffer.write(data)
                    out.flush()
                if status is not None:
                    del left[index]
                    first = first or (128 - status if status < 0 else status)
            time.sleep(POLL_S)
        return first

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Collect the signals that are meant for the ranks."""

        def note(number: int, _: FrameType | None) -> None:
            self._asked.append(number)

        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = [
                getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
            ]
            handlers = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def environments(found: Sequence[tuple[str, str, int, list[str]]]) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun would set it.

    Args:
        found: For each rank its node, its address, a free port there, and its GPUs; ranks of a node stand together.
    """
    nodes = list(dict.fromkeys(node for node, *_ in found))
    result = []
    for number, (node, *_) in enumerate(found):
        members = [index for index, (other, *_) in enumerate(found) if other == node]
        # A rank sees all GPUs of its node's ranks, and takes the one of its local number.
        gpus = [gpu for index in members for gpu in found[index][3]]
        environment = {
            "RANK": str(number),
            "WORLD_SIZE": str(len(found)),
            "LOCAL_RANK": str(members.index(number)),
            "LOCAL_WORLD_SIZE": str(len(members)),
            "GROUP_RANK": str(nodes.index(node)),
            "MASTER_ADDR": "127.0.0.1" if len(nodes) == 1 else found[0][1],
            "MASTER_PORT": str(found[0][2]),
        }
        result.append(environment | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}))
    return result
