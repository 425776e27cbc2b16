"""Starts a supervisor behind one of the isolation backends of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

START_S = 30.0
"""Seconds for a supervisor to load its modules, even on a loaded machine."""

_BOOT = (
    "import sys, types; whet = types.ModuleType('whet'); whet.__path__ = [sys.argv[1]]; sys.modules['whet'] = whet; "
    "from whet.sandbox.inside.supervisor import main; main()"
)
"""Imports the modules of this folder without the rest of the package."""

_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
}


class SupervisorError(Exception):
    """The supervisor is gone, or could not be started; says why."""


class Supervisor:
    """The client's handle of a running supervisor; jobs are sent to its socket.

    Attributes:
        backend: Name of its isolation.
        has_landlock: Whether landlock confines its children, too.
        socket: Takes requests (`supervisor.REQUEST` with file descriptors); safe to use from several threads.
    """

    def __init__(self, backend: str) -> None:
        """Start it.

        Args:
            backend: A key of `BACKENDS`.

        Raises:
            SupervisorError: If it did not start; says why.
        """
        self.backend = backend
        package = Path(__file__).parents[1]
        python = os.path.realpath(sys.executable)
        command = [
            *BACKENDS[backend](python, package),
            python,
            "-B",
            "-s",
            "-S",
            "-P",
            "-c",
            _BOOT,
            str(package),
        ]
        environment = _ENVIRONMENT | {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
        try:
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no file descriptors left
            raise SupervisorError(str(error)) from None
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                self.socket.close()
                raise SupervisorError(str(error)) from None
        self.socket.settimeout(START_S)
        try:
            hello = self.socket.recv(64)
        except OSError as error:
            hello = b""
            self._kill()
            reason = str(error)
        else:
            reason = "it exited immediately"
        assert self.process.stderr is not None
        if not hello:
            lines = self.process.stderr.read().decode("utf-8", "replace").strip().splitlines()
            self.process.stderr.close()
            self.close()
            raise SupervisorError(lines[-1] if lines else reason)
        self.process.stderr.close()
        self.socket.settimeout(None)
        self.has_landlock = hello == b"landlock"

    def close(self) -> None:
        """Kill it and all its children."""
        self.socket.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()

    def _kill(self) -> None:
        """Kill it with its process group: behind namespaces it is a grandchild, which would outlive its parent."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Drop it after a fork: its socket belongs to the parent process."""
        with suppress(OSError):
            self.socket.close()
        self.process.returncode = 0


def _bubblewrap(python: str, package: Path) -> list[str]:
    """Return the command that runs a program in namespaces with only the interpreter's files.

    As root no user namespace is created: the supervisor keeps the capabilities to become nobody in its children.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SupervisorError("bubblewrap is not installed (apt install bubblewrap)")
    words = [bwrap]
    for space in ("ipc", "pid", "net", "uts"):
        words.append(f"--unshare-{space}")
    words.append("--unshare-cgroup-try")
    if os.geteuid() == 0:
        words += ["--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_CHROOT"):
            words += ["--cap-add", capability]
    else:
        # The supervisor moves into a root folder of its own, then drops this; without landlock that is the only wall
        # around the interpreter's files.
        words += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-add", "CAP_SYS_CHROOT"]
    for folder in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    library = Path(sysconfig.get_path("stdlib"))
    for path in (
        *("/nix/store", "/etc/ld.so.cache", "/usr/share/zoneinfo"),
        *(library.parent, python, package / "sandbox"),
    ):
        if not str(path).startswith(("/usr/lib/", "/lib/")):
            # Made by a bind, the folders above would be root's alone (mode 700), whom the children cannot be.
            for folder in list(Path(path).parents)[-2::-1]:
                words += ["--dir", str(folder)]
            words += ["--ro-bind-try", str(path), str(path)]
    for name in ("site-packages", "dist-packages"):  # installed packages are none of a program's business
        folder = str(library / name)
        if os.path.isdir(folder):
            words += ["--tmpfs", folder, "--remount-ro", folder]
    for device in ("/dev/null", "/dev/urandom"):
        words += ["--dev-bind", device, device]
    return [*words, "--proc", "/proc", "--remount-ro", "/", "--hostname", "sandbox", "--chdir", "/", "--"]


def _bare(python: str, package: Path) -> list[str]:
    """Return no command: each child isolates itself."""
    return []


BACKENDS: Final[Mapping[str, Callable[[str, Path], list[str]]]] = {"bwrap": _bubblewrap, "landlock": _bare}
"""Strongest first: namespaces around the limits that each child sets, or those limits alone."""
