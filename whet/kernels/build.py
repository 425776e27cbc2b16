"""Build the CPU kernels once, at first use, where there is a compiler; without one everything runs on the eager twins.

The library has no dependency on PyTorch's headers: it is C++17, called with pointers and sizes. It uses the OpenMP
runtime that PyTorch brings, so that both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from whet.kernels.dispatch import mode

SOURCES = ("vec.h", "gemm.h", "attention.h", "rows.h", "cpu.cpp")
FLAGS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fopenmp", "-fvisibility=hidden", "-fPIC", "-Wno-psabi")
BUILD_SECONDS = 300


def compiler() -> str | None:
    """Return the C++ compiler, if there is one: $CXX, g++ or clang++."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def cache_folder() -> Path:
    """Return the folder that built kernels are kept in: $XDG_CACHE_HOME/whet, or ~/.cache/whet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whet" / "kernels"


@cache
def library() -> ctypes.CDLL | None:
    """Load the kernels, building them first where this machine has not built this version yet.

    Returns:
        The library, or None: the switch says eager, no compiler, or it fails (`reason` says which).
    """
    return _load()[0]


def reason() -> str:
    """Say in a few words which kernels the CPU runs, or why eager ones."""
    return _load()[1]


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if mode() == "eager":
        return None, "eager: WHET_KERNELS=eager"
    if platform.system() != "Linux":
        return None, f"eager: kernels are built on Linux only, this is {platform.system()}"
    cxx = compiler()
    if cxx is None:
        return None, "eager: no C++ compiler (g++ or clang++) to build the kernels with"
    try:
        path = _build(cxx)
        runtime = next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))), None)
        if runtime is not None:
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"eager: the kernels could not be built ({str(error).splitlines()[0][:200]})"
    return loaded, f"C++, {path.parent.name}"


def _build(cxx: str) -> Path:
    """Return the library's path; the name is a hash of all that it is made of."""
    home = Path(__file__).parent
    version = subprocess.run(
        [cxx, "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    digest = hashlib.sha256("\x00".join([version, *FLAGS, _processor()]).encode())
    for name in SOURCES:
        digest.update((home / name).read_bytes())
    folder = cache_folder() / digest.hexdigest()[:16]
    final = folder / "cpu.so"
    if final.is_file() and final.stat().st_uid == os.getuid():
        return final
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # no home to keep it in
        final = Path(tempfile.mkdtemp(prefix="whet-kernels-")) / "cpu.so"
    with tempfile.TemporaryDirectory(dir=final.parent) as work:
        made = Path(work) / "cpu.o"
        options = {"capture_output": True, "text": True, "timeout": BUILD_SECONDS}
        compiled = subprocess.run([cxx, *FLAGS, "-c", str(home / "cpu.cpp"), "-o", str(made)], **options)
        # Linked without -fopenmp: its symbols are those of the runtime that PyTorch has loaded.
        linked = (
            compiled.returncode
            or subprocess.run([cxx, "-shared", str(made), "-o", f"{made}.so"], **options).returncode
        )
        if linked:
            raise OSError((compiled.stderr or "the linker failed").strip().splitlines()[0])
        os.replace(f"{made}.so", final)
    return final


def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
