"""The supervisor process, which forks the children that run model-written code: small, single-threaded, no secrets.

`launch.py` starts it with a clean environment. It loads the modules that programs commonly import, and forks a child
per job: forking a small process costs a fraction of starting an interpreter. It sees no code, input or output: those
pass between client and child directly, so that nothing of one job is in the memory that another is forked from.

A job is one message on the socket at fd 0: `REQUEST` (bytes of memory beyond the interpreter's own, CPU seconds) with
7 file descriptors: a socket for this job, then the child's stdin, stdout, stderr, status, payload and channel.
The supervisor sends `REPORT` on the job's socket once the child has been reaped; one byte, or end of file, from the
client means: kill.
"""

from __future__ import annotations

import array
import gc
import importlib
import locale
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from whet.sandbox.inside import child, lockdown

try:  # loaded before the sandbox closes; importing this on another system needs no library
    import fcntl
except ImportError:
    fcntl = cast(Any, None)

REQUEST = struct.Struct("=QQ")
REPORT = struct.Struct("=iiq")
"""Wait status, why the supervisor killed it (0: it did not), peak memory in KiB."""

TOO_MANY_THREADS = 1
NUM_FDS = 7
MAX_THREADS = 128
THREADS_EVERY_S = 0.02
FIRST_FREE_FD = 16
"""Lower descriptors belong to the child: its own go to 0..5, and /dev/null to `child.NULL_FD`."""

PRELOADED = (
    "abc argparse array ast asyncio base64 binascii bisect bz2 calendar cmath codecs collections "
    "concurrent.futures.thread contextlib contextvars copy csv ctypes dataclasses datetime decimal difflib enum "
    "errno fnmatch fractions functools glob graphlib gzip hashlib heapq hmac html inspect io itertools json keyword "
    "linecache locale logging lzma math mmap numbers operator os pathlib pickle platform pprint queue random re "
    "resource sched secrets select selectors shutil signal socket sqlite3 statistics string struct subprocess sys "
    "tempfile textwrap threading time timeit tokenize traceback types typing unicodedata unittest urllib.parse uuid "
    "warnings weakref xml.etree.ElementTree zipfile zlib zoneinfo"
)


@dataclass(slots=True)
class _Job:
    """A running child.

    Attributes:
        pid: Its process id.
        pidfd: Readable once it has ended.
        link: The job's socket.
        reason: Why the supervisor killed it.
    """

    pid: int
    pidfd: int
    link: socket.socket
    reason: int = 0


class Supervisor:
    """Forks, watches and reaps children until the client goes away."""

    def __init__(self) -> None:
        self.client = socket.socket(fileno=_move_up(0))
        self.processes = _move_up(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in range(FIRST_FREE_FD):
            if fd != null:
                os.dup2(null, fd)
        lockdown.become_subreaper()
        for name in PRELOADED.split():
            with suppress(ImportError):  # a Python built without it
                importlib.import_module(name)
        with suppress(locale.Error):  # loaded now: a child cannot read locale files
            locale.setlocale(locale.LC_ALL, "")
        self.ruleset, self.leaves_root = _drop_access()
        gc.collect()
        gc.freeze()
        self.memory_bytes = int(self._read("self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        self.jobs: dict[int, _Job] = {}
        self.poll = select.poll()
        self.poll.register(self.client, select.POLLIN)
        self.pid = os.getpid()

    def serve(self) -> None:
        """Serve until the client is gone; then kill every child."""
        tier = "landlock" if self.ruleset >= 0 else "no landlock"
        self.client.send(tier.encode())
        checked = time.monotonic()
        while True:
            waited = self.poll.poll(1000 * THREADS_EVERY_S if self.jobs else None)
            ready = {fd for fd, _ in waited}
            for fd in ready & self.jobs.keys():
                job = self.jobs.get(fd)
                if job is not None and fd == job.pidfd:
                    self._reap(job)
                elif job is not None:
                    self._kill(job, 0)
            # Last: a new job may reuse the number of a descriptor that has just been closed.
            if self.client.fileno() in ready and not self._accept():
                return
            if time.monotonic() - checked > THREADS_EVERY_S:
                checked = time.monotonic()
                for job in {id(job): job for job in self.jobs.values()}.values():
                    if self._num_threads(job) > MAX_THREADS:
                        self._kill(job, TOO_MANY_THREADS)

    def _accept(self) -> bool:
        """Receive a message and fork its child; False when the client is gone."""
        space = socket.CMSG_SPACE(NUM_FDS * array.array("i").itemsize)
        data, ancillary, _, _ = self.client.recvmsg(REQUEST.size, space, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        memory_bytes, cpu_s = REQUEST.unpack(data)
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                child.main(
                    list(fds)[1:],
                    self.processes,
                    self.ruleset,
                    leaves_root=self.leaves_root,
                    parent=self.pid,
                    memory_bytes=self.memory_bytes + memory_bytes,
                    cpu_s=cpu_s,
                )
            os._exit(1)
        job = _Job(pid, os.pidfd_open(pid), socket.socket(fileno=fds[0]))
        for fd in fds[1:]:
            os.close(fd)
        for fd in (job.pidfd, job.link.fileno()):
            self.jobs[fd] = job
            self.poll.register(fd, select.POLLIN)
        return True

    def _kill(self, job: _Job, reason: int) -> None:
        """Kill a child; its pidfd then becomes readable."""
        job.reason = job.reason or reason
        with suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGKILL)
        if job.link.fileno() in self.jobs:
            self.poll.unregister(job.link)
            del self.jobs[job.link.fileno()]

    def _reap(self, job: _Job) -> None:
        """Reap a child that has ended, report to the client, and forget it."""
        _, status, usage = os.wait4(job.pid, 0)
        with suppress(OSError):
            job.link.send(REPORT.pack(status, job.reason, usage.ru_maxrss))
        for fd in (job.pidfd, job.link.fileno()):
            if self.jobs.pop(fd, None) is not None:
                self.poll.unregister(fd)
        os.close(job.pidfd)
        job.link.close()
        with suppress(ChildProcessError):  # orphans reparented to us; a job's own child is reaped only above
            while not self.jobs and os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _num_threads(self, job: _Job) -> int:
        try:
            return int(self._read(f"{job.pid}/stat").rpartition(b")")[2].split()[17])
        except OSError:
            return 0

    def _read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY, dir_fd=self.processes)
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)


def _move_up(fd: int) -> int:
    """Move a file descriptor out of the range that belongs to children."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD)


def _drop_access() -> tuple[int, bool]:
    """Drop access to the machine's files as far as the kernel allows.

    Returns:
        The landlock ruleset, -1 for none, and whether another user than root can still read the library.
    """
    library = sysconfig.get_path("stdlib")
    extensions = os.path.join(library, "lib-dynload")
    inside = [
        os.path.join(library, name)
        for name in os.listdir(library)
        if name not in ("site-packages", "dist-packages", "lib-dynload")
    ]
    ruleset = -1
    if lockdown.landlock_version():
        ruleset = lockdown.make_ruleset([*inside, extensions, "/usr/share/zoneinfo"], [library])
    sys.path[:] = [library, extensions]
    leaves_root = lockdown.is_open_to_all(library)
    with suppress(OSError):  # only root may, and only root needs it (if the library is in a private folder)
        os.chroot(library)
        os.chdir("/")
        leaves_root = True
        sys.path[:] = ["/", "/lib-dynload"]
        for module in list(sys.modules.values()):
            places = getattr(module, "__path__", None)
            if isinstance(places, list):
                places[:] = [place.removeprefix(library) for place in places]
    sys.path_importer_cache.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "whet"]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC"})
    return ruleset, leaves_root


def main() -> None:
    """Run as a separate process; the client is at fd 0, a SOCK_SEQPACKET socket."""
    Supervisor().serve()
