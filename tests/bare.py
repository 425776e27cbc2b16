"""Run a command as on a bare machine: Python, a shell and coreutils; no compiler, git, browser, engine or network.

    python tests/bare.py                          # the demo, with a short evaluation
    python tests/bare.py -- make test
    python tests/bare.py --tree CLONE --venv CLONE/.venv -- .venv/bin/python -m whet env

The command runs in a copy of the tree whose path has a space, with `.venv` linked to the installed environment, in a
small environment (LANG=C, a HOME that cannot be written). A mount and a network namespace hide programs under their
absolute paths too, and the network; where namespaces are forbidden, PATH alone hides programs, which a line says.
The exit status is the command's; 125 if the environment could not be made bare.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = (".venv/bin/python", "-m", "whet", "demo", "--num-problems", "64", "--num-samples", "4")
"""The demo's training is whole; its evaluations are short."""
KEPT = """
[ awk basename bash cat chgrp chmod chown chroot cmp comm cp cut date dd df diff dirname du echo egrep env expr false
fgrep find fold getconf grep groups gunzip gzip head hostname id install join kill ldconfig link ln logname ls make
mkdir mkfifo mktemp mv nice nl nohup nproc od paste pathchk pr printenv printf pwd readlink realpath rm rmdir sed seq sh
sha256sum sleep sort split stat stdbuf stty sum sync tac tail tar tee test timeout touch tr true truncate tsort tty
uname uniq unlink wc which who whoami xargs yes
"""
"""What a small image of a system has, and make, which README's commands start with."""
HIDDEN = """
bwrap c++ c++filt cc chromium chromium-browser clang clang++ clang-format cmake curl firefox g++ gcc git go
google-chrome llama-cli llama-quantize node npm nvcc nvidia-smi ollama qemu-aarch64 qemu-aarch64-static rustc stockfish
aarch64-linux-gnu-g++ wget
"""
"""Programs that whet or its tests look for, and a few more: none may be found once the environment is bare."""
SYSTEM = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/usr/games",
    "/usr/local/games",
    "/snap/bin",
)
NEW_NAMESPACE, NEW_USER, NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
NOT_BARE = 125


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="source tree (default: this one)")
    parser.add_argument("--venv", type=Path, help="installed environment (default: the tree's .venv)")
    parser.add_argument("command", nargs="*", default=list(DEMO), help="after --; default: the demo")
    args = parser.parse_args(arguments)
    tree = args.tree.resolve()
    venv = (args.venv or tree / ".venv").resolve()
    if not (venv / "bin/python").exists():
        parser.error(f"{venv} has no bin/python: run make setup, or name an environment with --venv")
    with tempfile.TemporaryDirectory(prefix="whet-bare-", ignore_cleanup_errors=True) as folder:
        return _run(args.command or list(DEMO), tree, venv, Path(folder))


def _run(command: list[str], tree: Path, venv: Path, folder: Path) -> int:
    """Copy the tree, prepare what is found, and run the command in a child process, whose namespaces end with it."""
    checkout, home = folder / "a checkout", folder / "home"
    copy_tree(tree, checkout)
    (checkout / ".venv").symlink_to(venv)
    home.mkdir(mode=0o555)
    base = (venv / "bin/python").resolve()
    own = _collect(folder / "bin", KEPT.split())
    (folder / "python").mkdir()
    (folder / "python/python3").symlink_to(base)
    child = os.fork()
    if child == 0:
        status = NOT_BARE
        try:
            status = _inside(command, folder, base, own)
        except BaseException as error:
            print(f"bare: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(status)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256
        except KeyboardInterrupt:  # the child has received it, too
            continue


def copy_tree(tree: Path, to: Path) -> None:
    """Copy what git does not ignore, with its times; without git all but environments and outputs."""
    listed = None
    if (tree / ".git").exists() and shutil.which("git"):
        ask = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(ask, capture_output=True, check=False)
    if listed is None or listed.returncode:
        skip = (".git", ".venv*", "__pycache__", ".*_cache", "runs", "build")
        shutil.copytree(tree, to, symlinks=True, ignore=shutil.ignore_patterns(*skip))
        return
    for name in filter(None, listed.stdout.decode().split("\0")):
        # A tracked file may have been deleted; the link to a shared environment is made afterwards.
        if (source := tree / name).is_file() and name != ".venv":
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)


def _collect(folder: Path, names: list[str]) -> Path:
    """Copy programs into a folder: links into what will be hidden would lead nowhere."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name, path=os.pathsep.join(SYSTEM))
        if found is not None:
            shutil.copy(Path(found).resolve(), folder / name)
    return folder


def _inside(command: list[str], folder: Path, base: Path, own: Path) -> int:
    """Enter the namespaces, check that nothing is found, and become the command."""
    problem = _enter(folder, base, own)
    path = [str(folder / "python"), *([str(own)] if problem else SYSTEM)]
    environment = {
        "PATH": os.pathsep.join(path),
        "HOME": str(folder / "home"),
        "LANG": "C",
        "TERM": "dumb",
        # The environment may be another tree's: what is run is the copy.
        "PYTHONPATH": str(folder / "a checkout"),
    }
    if problem:
        print(
            f"bare: no namespaces ({problem}): programs are hidden by PATH alone, the network is on",
            flush=True,
        )
    if found := _found(environment, by_path_alone=bool(problem)):
        raise OSError(f"still found: {' '.join(found)}")
    if not problem:
        hidden = "other programs hidden, network off, HOME read-only, LANG=C"
        print(
            f"bare: {len(list(own.iterdir()))} programs kept, {hidden}; in {folder / 'a checkout'}",
            flush=True,
        )
    os.chdir(folder / "a checkout")
    os.execvpe(command[0], command, environment)


def _enter(folder: Path, base: Path, own: Path) -> str:
    """Hide programs, network and a writable HOME in new namespaces; return why that is impossible, or ''."""
    try:
        _unshare()
        _call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
        hidden = {
            Path(place).resolve()
            for place in [*SYSTEM, *os.environ.get("PATH", "").split(os.pathsep)]
            if place
        }
        hidden |= {*Path("/opt").glob("*/bin"), *Path("/usr/local").glob("cuda*/bin")}
        for place in sorted(hidden):
            is_system = str(place) in SYSTEM or any(
                os.access(place / name, os.X_OK) for name in HIDDEN.split()
            )
            if (
                os.path.isdir(place) and is_system
            ):  # not Path.is_dir, which fails below a folder of another user
                _bind(_with_python(own, place, folder) if place == base.parent else own, place)
        home = folder / "home"
        _bind(home, home)
        _call("mount", b"none", str(home).encode(), None, REMOUNT | BIND | READ_ONLY, None)
        _loopback()
    except OSError as error:
        return str(error)
    return ""


def _unshare() -> None:
    """Leave the namespaces of mounts and the network; a user without the right to do so gets it in one of users."""
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", NEW_NAMESPACE | NEW_NETWORK)
    except PermissionError:
        _call("unshare", NEW_USER | NEW_NAMESPACE | NEW_NETWORK)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _bind(source: Path, target: Path) -> None:
    _call("mount", str(source).encode(), str(target).encode(), None, BIND, None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    if getattr(libc, name)(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _with_python(own: Path, place: Path, folder: Path) -> Path:
    """Return a folder of the kept programs and the interpreters of a system's folder, which start only from there."""
    both = folder / "bin and python"
    shutil.copytree(own, both)
    for interpreter in place.glob("python3*"):
        if interpreter.is_file() and "-" not in interpreter.name:
            shutil.copy(interpreter.resolve(), both / interpreter.name)
    return both


def _loopback() -> None:
    """Raise the new network's loopback: servers of tests listen there."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as it:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(it, get_flags, request))[1]
        fcntl.ioctl(it, set_flags, struct.pack("16sh22x", b"lo", flags | up))


def _found(environment: Mapping[str, str], *, by_path_alone: bool) -> list[str]:
    """Return what a bare machine would not have: programs, and a network or a writable HOME where they were hidden."""
    places = (
        environment["PATH"] if by_path_alone else os.pathsep.join([environment["PATH"], os.environ["PATH"]])
    )
    found = [name for name in HIDDEN.split() if shutil.which(name, path=places)]
    if by_path_alone:
        return found
    try:
        (Path(environment["HOME"]) / "trial").touch()
        found.append("a writable HOME")
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as it:
        try:
            it.connect(("192.0.2.1", 9))  # sends nothing: asks for a route
            found.append("a network")
        except OSError:
            pass
    return found


if __name__ == "__main__":
    sys.exit(main())
