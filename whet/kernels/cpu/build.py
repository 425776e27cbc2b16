"""Builds the CPU kernels at first use, if there is a compiler; without one everything runs on the eager twins.

The library does not depend on PyTorch's headers: it is C++17, called with pointers and sizes. It uses PyTorch's OpenMP
runtime, so that both share one thread pool. `WHET_KERNELS_ARCH` selects the instruction set; each has its own cache
entry. A new library is first tried in a child process: a wrong guess about compiler, runtime or CPU crashes there, not
in a run.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from whet.config import cache_folder
from whet.kernels.mode import mode
from whet.types import UserError

VARIABLE = "WHET_KERNELS_ARCH"
SOURCES = ("vec.h", "gemm.h", "attention.h", "rows.h", "selftest.h", "cpu.cpp")
# Without contraction the source, not the compiler, decides where a product and a sum become one operation (FMA).
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-Wno-psabi")
BUILD_SECONDS, TRIAL_SECONDS = 300, 60
TRIAL_ERROR = 1e-5
"""Largest error, relative to the largest element, that the library's self-test may report in float32."""
SYSTEMS = ("Linux", "Darwin")


@dataclass(frozen=True, slots=True)
class Target:
    """An instruction set to build for.

    Attributes:
        machines: Names of `platform.machine()` that have it.
        flags: The compiler's options.
        needs: Features that /proc/cpuinfo must list; empty if every such machine has them.
    """

    machines: tuple[str, ...]
    flags: tuple[str, ...]
    needs: tuple[str, ...] = ()


X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_V2 = ("cx16", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
TARGETS = {
    "x86-64-v2": Target(X86, ("-march=x86-64-v2",), _V2),
    "x86-64-v3": Target(X86, ("-march=x86-64-v3",), _V3),
    "x86-64-v4": Target(X86, ("-march=x86-64-v4",), _V4),
    "x86-64-v4-bf16": Target(X86, ("-march=x86-64-v4", "-mavx512bf16"), (*_V4, "avx512_bf16")),
    "armv8-a": Target(ARM, ("-march=armv8-a",)),
}
NATIVE = "native"


def compiler() -> str | None:
    """Return the C++ compiler, if there is one: $CXX, g++ or clang++ (on macOS clang++ first)."""
    names = ("clang++", "g++") if platform.system() == "Darwin" else ("g++", "clang++")
    for name in (os.environ.get("CXX", ""), *names):
        if name and (found := shutil.which(name)):
            return found
    return None


def runnable() -> list[str]:
    """Return the names of the targets that this CPU can run, least demanding first."""
    return [name for name in TARGETS if not _lacks(name)]


def _lacks(name: str) -> str:
    """Return what this machine lacks for a target; empty if nothing."""
    target = TARGETS[name]
    if platform.machine() not in target.machines:
        return f"an {target.machines[0]} machine"
    return " ".join(sorted(set(target.needs) - _features()))


def arch() -> str:
    """Return the requested target: $WHET_KERNELS_ARCH, or native.

    Raises:
        UserError: If there is no such target, or this CPU cannot run it.
    """
    name = os.environ.get(VARIABLE) or NATIVE
    if name == NATIVE:
        return name
    if name not in TARGETS:
        raise UserError(f"{VARIABLE} = {name!r}: expected native or one of {', '.join(TARGETS)}")
    if lacks := _lacks(name):
        able = ", ".join([NATIVE, *runnable()])
        raise UserError(f"{VARIABLE} = {name}: this CPU cannot run it (it lacks {lacks}): use one of {able}")
    return name


@cache
def library() -> ctypes.CDLL | None:
    """Load the kernels; build them first if this machine has not built this version yet.

    Returns:
        The library, or None: eager mode, no compiler, or a failure (`reason` says which).
    """
    return _load()[0]


def reason() -> str:
    """Describe in a few words which kernels the CPU runs, or why the eager ones."""
    return _load()[1]


def folder() -> Path | None:
    """Return the folder of the loaded library, where its measurements are stored too; None without one."""
    return _load()[2]


@cache
def instruction_set() -> str:
    """Name the instruction set of the loaded library: avx512-bf16, avx512, avx2, sse4.2 or neon; empty without one."""
    loaded = library()
    if loaded is None:
        return ""
    loaded.whet_instruction_set.restype = ctypes.c_char_p
    return loaded.whet_instruction_set().decode()


@cache
def _load() -> tuple[ctypes.CDLL | None, str, Path | None]:
    if mode() == "eager":
        return None, "eager: WHET_KERNELS=eager", None
    target = arch()
    if platform.system() not in SYSTEMS or platform.machine() not in X86 + ARM:
        here = f"{platform.system()} on {platform.machine()}"
        return None, f"eager: kernels are built on Linux and macOS, x86-64 and ARM; this is {here}", None
    cxx = compiler()
    if cxx is None:
        return None, "eager: no C++ compiler (g++ or clang++) to build the kernels with", None
    try:
        path = _build(cxx, target)
        _try(path)
        _load_openmp()
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"eager: the kernels could not be built ({str(error).splitlines()[0][:200]})", None
    return loaded, f"C++, {path.parent.name}", path.parent


def _openmp() -> Path | None:
    """Return the OpenMP runtime that PyTorch ships."""
    folder = Path(torch.__file__).parent / "lib"
    return next((path for name in ("libgomp*", "libomp*") for path in sorted(folder.glob(name))), None)


def _load_openmp() -> None:
    runtime = _openmp()
    if runtime is not None:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)


def flags(target: str) -> tuple[str, ...]:
    """Return the compiler's options for a target."""
    if target != NATIVE:
        return (*FLAGS, *TARGETS[target].flags)
    if platform.machine() in ARM:
        return (*FLAGS, "-mcpu=native")
    return (*FLAGS, "-march=native")


def _code(source: bytes) -> bytes:
    """Return C++ without comments and layout: a run is not refused on resume for a comment that changed."""
    return b" ".join(re.sub(rb"//[^\n]*|/\*.*?\*/", b" ", source, flags=re.DOTALL).split())


def _build(cxx: str, target: str) -> Path:
    """Return the library's path; its name is a hash of everything that goes into it."""
    home = Path(__file__).parent
    version = subprocess.run(
        [cxx, "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    is_mac = platform.system() == "Darwin"
    # Apple's clang++ accepts the pragmas only with -Xpreprocessor; symbols come from PyTorch's loaded runtime.
    openmp = ("-Xclang", "-fopenmp") if is_mac else ("-fopenmp",)
    link = ("-dynamiclib", "-undefined", "dynamic_lookup") if is_mac else ("-shared",)
    processor = _processor() if target == NATIVE else platform.machine()
    digest = hashlib.sha256("\x00".join([version, *flags(target), *openmp, processor]).encode())
    for name in SOURCES:
        digest.update(_code((home / name).read_bytes()))
    folder = cache_folder() / "kernels" / digest.hexdigest()[:16]
    final = folder / "cpu.so"
    if final.is_file() and final.stat().st_uid == os.getuid():
        return final
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # no writable home folder
        final = Path(tempfile.mkdtemp(prefix="whet-kernels-")) / "cpu.so"
    with tempfile.TemporaryDirectory(dir=final.parent) as work:
        made = Path(work) / "cpu.o"
        options = {"capture_output": True, "text": True, "timeout": BUILD_SECONDS}
        command = [cxx, *flags(target), *openmp, "-c", str(home / "cpu.cpp"), "-o", str(made)]
        done = subprocess.run(command, **options)
        if done.returncode == 0:  # linked without -fopenmp
            done = subprocess.run([cxx, *link, str(made), "-o", f"{made}.so"], **options)
        if done.returncode:
            lines = (done.stderr or f"{Path(cxx).name} failed").strip().splitlines()
            raise OSError(next((line for line in lines if "error" in line), lines[0]))
        os.replace(f"{made}.so", final)
    return final


# Run in a child process: only the library, with PyTorch's OpenMP runtime; a crash there is harmless.
_TRIAL = """
import ctypes, sys
library, runtime, limit = sys.argv[1:]
if runtime:
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
test = ctypes.CDLL(library).whet_selftest
test.restype = ctypes.c_double
error = test(2)
sys.exit(0 if error <= float(limit) else f"its own test is off by {error:.1e}")
"""


def _try(path: Path) -> None:
    """Run the library's self-test in a child process, once per library.

    Raises:
        OSError: If it crashes or computes wrong numbers.
    """
    passed = path.with_suffix(".tried")
    if passed.is_file():
        return
    words = [sys.executable, "-I", "-c", _TRIAL, str(path), str(_openmp() or ""), str(TRIAL_ERROR)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TRIAL_SECONDS)
    if done.returncode < 0:
        raise OSError(f"a trial of the freshly built library died of signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"its trial ended with status {done.returncode}"]
        raise OSError(lines[-1])
    passed.touch()


@cache
def _features() -> frozenset[str]:
    """Return the CPU's feature flags, by their Linux names."""
    if platform.system() == "Darwin":
        names = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
        done = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True)
        apple = {"sse4.1": "sse4_1", "sse4.2": "sse4_2", "avx1.0": "avx", "lzcnt": "abm"}
        return frozenset(apple.get(word, word) for word in done.stdout.lower().split())
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


@cache
def _cpuinfo() -> tuple[str, ...]:
    try:
        return tuple(Path("/proc/cpuinfo").read_text().splitlines())
    except OSError:
        return ()


def _processor() -> str:
    """Return what -march=native depends on."""
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in _cpuinfo() if line.startswith(wanted)})) or platform.processor()
