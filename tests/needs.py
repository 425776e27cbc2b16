"""What a test needs that a machine with Python and nothing else lacks: one place decides, and gives the reason.

`@needs("stockfish")` skips a test, `require("shared/data/gsm8k")` what is left of it. A test skips for what is missing,
never for an error: a compiler that cannot build the kernels is no missing compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from whet.kernels.cpu import build, toolchain
from whet.tasks.chess.stockfish import find_stockfish

SHARED = Path(__file__).parents[1].parent / "shared"
"""The folder of public data beside a developer's checkout; nobody else has it."""
READERS = {
    name: os.path.join(os.environ["WHET_READERS"], folder) if "WHET_READERS" in os.environ else ""
    for name, folder in {"transformers 4.56": "transformers", "mlx-lm": "mlx"}.items()
}
"""Folders of packages that stand before this environment's own, for programs that read what whet writes (make slow)."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
C_COMPILERS = ("cc", "gcc", "clang")


def program(*names: str) -> str:
    """Return the path of the first program that is found, or ""."""
    return next(filter(None, map(shutil.which, names)), "")


def _has_kernels() -> bool:
    return build.library() is not None


def _bfloat16_is_row_invariant() -> bool:
    """Whether this machine's BLAS gives a row of a bfloat16 product the same bits for every padded number of rows."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(272, 128, generator=generator).bfloat16() for _ in range(2))
    whole = torch.nn.functional.linear(x, w)
    rows = all(torch.equal(torch.nn.functional.linear(x[:m], w), whole[:m]) for m in range(16, 272, 16))
    keys = x.view(1, 272, 128)[:, :256]
    scores = keys @ keys.transpose(1, 2)
    few = all(torch.equal(keys[:, :m] @ keys.transpose(1, 2), scores[:, :m]) for m in (4, 8, 64))
    return rows and few


def _has_landlock() -> bool:
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


def _starts_bubblewrap() -> bool:
    """Return whether bubblewrap can make its namespaces, tried without whet: a fault of ours must fail a test."""
    spaces = [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts")]
    user = ["--unshare-user"] if os.geteuid() else []
    words = [program("bwrap"), *spaces, *user, "--ro-bind", "/", "/", "true"]
    return bool(words[0]) and subprocess.run(words, capture_output=True, check=False).returncode == 0


def anybodys_python() -> str:
    """Return a Python of this version that every user can start; '' if there is none."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (os.path.realpath(sys.executable), shutil.which(name, path="/usr/local/bin:/usr/bin")):
        words = [path or "false", "-c", ""]
        try:
            if subprocess.run(words, user=4321, group=4321, extra_groups=[], check=False).returncode == 0:
                return str(path)
        except PermissionError:
            continue
    return ""


def _has_namespaces() -> bool:
    if not (program("ip") and program("unshare")):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


THINGS: dict[str, tuple[Callable[[], object], str]] = {
    "stockfish": (find_stockfish, "Stockfish is not installed: apt-get install stockfish"),
    "browser": (lambda: program(*BROWSERS), "there is no Chromium: apt-get install chromium"),
    "c compiler": (lambda: program(*C_COMPILERS), "there is no C compiler"),
    "c++ compiler": (toolchain.compiler, "there is no C++ compiler"),
    "arm compiler": (
        lambda: program("aarch64-linux-gnu-g++"),
        "there is no compiler for ARM: apt-get install g++-aarch64-linux-gnu",
    ),
    "arm emulator": (
        lambda: program("qemu-aarch64"),
        "there is no emulator of ARM: apt-get install qemu-user",
    ),
    "bwrap": (_starts_bubblewrap, "no bubblewrap that may make namespaces: apt-get install bubblewrap"),
    "landlock": (_has_landlock, "this kernel has no landlock"),
    "root": (lambda: os.geteuid() == 0, "root alone can be another user"),
    "a Python for every user": (
        lambda: anybodys_python(),
        "no Python of this version can be started by every user",
    ),
    "git": (lambda: program("git"), "git is not installed"),
    "iconv": (lambda: program("iconv"), "there is no iconv"),
    "kernels": (_has_kernels, "there are no C++ kernels here"),
    "x86": (lambda: build.platform.machine() in build.X86, "not an x86-64 machine"),
    "network namespaces": (
        _has_namespaces,
        "no network namespaces (ip, unshare, and the right to make them)",
    ),
    "row-invariant bfloat16": (
        _bfloat16_is_row_invariant,
        "bfloat16 products are not row-invariant on this machine: exactness is not claimed here",
    ),
    "linux": (lambda: sys.platform == "linux", "Linux alone has /proc, prctl and the like"),
    "pipes": (lambda: hasattr(os, "mkfifo"), "this system has no named pipes"),
    "ordinary user": (lambda: os.geteuid() != 0, "root may do everything"),
    "no gpu": (lambda: not torch.cuda.is_available(), "this machine has a GPU"),
    **{
        name: (partial(os.path.isdir, folder), f"WHET_READERS names no folder with {name} (make slow)")
        for name, folder in READERS.items()
    },
    "clients": (
        lambda: "CLIENTS_PYTHON" in os.environ,
        "CLIENTS_PYTHON names no Python that has the clients of tests/serve/clients (make slow)",
    ),
    "clients of npm": (
        lambda: "CLIENTS_NODE" in os.environ,
        "CLIENTS_NODE names no folder with the clients of tests/serve/clients/package.json (make slow)",
    ),
    "vllm": (lambda: "VLLM_PYTHON" in os.environ, "VLLM_PYTHON names no Python that has vLLM (make slow)"),
}


@cache
def missing(*things: str) -> str:
    """Return why a test cannot run here, or "" where it can.

    Args:
        things: Names of `THINGS`, paths below `shared/`, absolute paths, or Python packages.
    """
    for thing in things:
        if thing.startswith("shared/"):
            found, reason = (SHARED.parent / thing).exists(), f"{thing} is not beside this checkout"
        elif thing.startswith("/"):
            found, reason = Path(thing).exists(), f"{thing} is not on this machine"
        elif thing in THINGS:
            found, reason = THINGS[thing][0](), THINGS[thing][1]
        else:
            found, reason = importlib.util.find_spec(thing), f"the Python package {thing} is not installed"
        if not found:
            return reason
    return ""


def needs(*things: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where something is `missing`."""
    reason = missing(*things)
    return pytest.mark.skipif(bool(reason), reason=reason)


def require(*things: str) -> None:
    """Skip the running test where something is `missing`."""
    if reason := missing(*things):
        pytest.skip(reason)
