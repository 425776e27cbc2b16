"""Builds the CPU kernels at first use, if there is a compiler; without one everything runs on the eager twins.

The library does not depend on PyTorch's headers: it is C++17, called with pointers and sizes. It uses PyTorch's OpenMP
runtime, so that both share one thread pool. `WHET_KERNELS_ARCH` selects the instruction set; each has its own cache
entry. A library is first tried in a child process: a wrong guess about compiler, runtime or CPU crashes there, not in a
run. What passed is recorded with its hash; a file that is not the recorded one is tried again, and rebuilt if it fails.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from whet.config import cache_folder, temporary_folder
from whet.kernels.cpu import toolchain
from whet.kernels.mode import mode
from whet.types import UserError

VARIABLE = "WHET_KERNELS_ARCH"
LIBRARY = "cpu.so"
SOURCES = ("vec.h", "gemm.h", "attention.h", "rows.h", "selftest.h", "cpu.cpp")
# Without contraction the source, not the compiler, decides where a product and a sum become one operation (FMA).
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-Wno-psabi")
TRIAL_SECONDS, SLOW_SECONDS = 60, 24 * 3600
TRIAL_ERROR = 1e-5
"""Largest error, relative to the largest element, that the library's self-test may report in float32."""
SYSTEMS = ("Linux", "Darwin")
BUILD = "whet-build-"
"""Beginning of the name of a build's folder, before the number of its process."""


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


class _Loaded(NamedTuple):
    """What `_load` found: the library, what `reason` and `folder` say, and the compilers that failed before."""

    library: ctypes.CDLL | None
    reason: str
    folder: Path | None = None
    failed: tuple[str, ...] = ()


@cache
def library() -> ctypes.CDLL | None:
    """Load the kernels; build them first if this machine has not built this version yet.

    Returns:
        The library, or None: eager mode, no compiler, or a failure (`reason` says which).
    """
    return _load().library


def reason() -> str:
    """Describe in a few words which kernels the CPU runs, or why the eager ones."""
    return _load().reason


def folder() -> Path | None:
    """Return the folder of the loaded library, where its measurements are stored too; None without one."""
    return _load().folder


def failed() -> str:
    """Say which compilers failed before the one that built the loaded library, and why; empty if none."""
    return "; ".join(_load().failed)


@cache
def instruction_set() -> str:
    """Name the instruction set of the loaded library: avx512-bf16, avx512, avx2, sse4.2 or neon; empty without one."""
    loaded = library()
    if loaded is None:
        return ""
    loaded.whet_instruction_set.restype = ctypes.c_char_p
    return loaded.whet_instruction_set().decode()


@cache
def _load() -> _Loaded:
    target = arch()  # refused in eager mode too
    if mode() == "eager":
        return _Loaded(None, "eager: WHET_KERNELS=eager")
    if platform.system() not in SYSTEMS or platform.machine() not in X86 + ARM:
        here = f"{platform.system()} on {platform.machine()}"
        return _Loaded(None, f"eager: kernels are built on Linux and macOS, x86-64 and ARM; this is {here}")
    failures: list[str] = []
    compilers = toolchain.compilers()
    for cxx in [*compilers, None]:
        try:
            path = _ready(target) if cxx is None else _obtain(cxx, target)
            if path is None:
                break
            runtime = toolchain.shipped_openmp()
            if runtime is not None:
                ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
            loaded = ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{Path(cxx or LIBRARY).name}: {toolchain.one_line(error)}")
        else:
            return _Loaded(loaded, f"C++, {path.parent.name}", path.parent, tuple(failures))
    if not compilers:
        return _Loaded(None, "eager: no C++ compiler (g++ or clang++) to build the kernels with")
    return _Loaded(None, f"eager: the kernels could not be built ({'; '.join(failures)})")


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


def _obtain(cxx: str, target: str) -> Path:
    """Return a compiler's library, which has passed its trial; its folder is named by a hash of all that goes into it.

    Raises:
        OSError: If it cannot be built, or fails its trial.
    """
    about = toolchain.version(cxx)
    runtime = toolchain.needed_openmp(cxx, about)
    places = _places(_key(target, [about], [] if runtime is None else [str(runtime)]))
    for place in places:
        path = place / LIBRARY
        if not (_is_own(place) and _is_own(path) and path.is_file() and os.access(path, os.R_OK)):
            continue
        record, mark = _record(path), _mark(path)
        try:
            if record != f"{mark} passed":
                _try(path)
        except OSError:
            if record == f"{mark} built":  # the compiler would only make the same file again
                raise
        else:
            _note_key(path, target)
            return path
    if not any(map(_holds, places)):
        raise OSError(f"no folder to keep them in: {' and '.join(map(str, places))} cannot be used")
    slow = next(filter(_holds, places)) / "too_slow"
    if _age_s(slow) < SLOW_SECONDS:
        raise OSError(f"timed out; it is tried again a day later, or without {slow}")
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=f"{BUILD}{os.getpid()}-") as work:
        try:
            source = Path(__file__).parent / SOURCES[-1]
            made = toolchain.make_library(cxx, flags(target), _openmp(), source, Path(work), runtime)
        except TimeoutError:  # not again at every start
            with suppress(OSError):
                slow.touch()
            raise
        path = _keep(made, places)
    _try(path)
    _note_key(path, target)
    return path


def _openmp() -> tuple[str, ...]:
    # Apple's clang++ accepts the pragmas only with -Xpreprocessor.
    return ("-Xclang", "-fopenmp") if platform.system() == "Darwin" else ("-fopenmp",)


def _key(target: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """Return a hash of all that goes into a library but the compiler, which `before` and `after` describe."""
    processor = _processor() if target == NATIVE else platform.machine()
    digest = hashlib.sha256("\x00".join([*before, *flags(target), *_openmp(), processor, *after]).encode())
    for name in SOURCES:
        digest.update(_code((Path(__file__).parent / name).read_bytes()))
    return digest.hexdigest()[:16]


def _note_key(path: Path, target: str) -> None:
    """Note what a library is for, so that it is found without its compiler (`_ready`)."""
    noted, key = path.with_suffix(".key"), _key(target)
    if _read_line(noted) != key:
        with suppress(OSError):
            noted.write_text(f"{key}\n")


def _ready(target: str) -> Path | None:
    """Return the newest library built for this processor by any compiler; None if there is none."""
    key = _key(target)
    found: list[Path] = []
    for place in _places(""):
        for path in place.glob(f"*/{LIBRARY}"):
            if _is_own(path.parent) and _is_own(path) and _read_line(path.with_suffix(".key")) == key:
                found.append(path)
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        if _record(path) == f"{_mark(path)} passed":
            return path
    return None


def _remove_abandoned() -> None:
    """Remove what builds that were killed left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{BUILD}*-*"):
        number = path.name.removeprefix(BUILD).partition("-")[0]
        if not number.isdecimal() or not _is_own(path):
            continue
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (OSError, OverflowError):  # another user's process has the number
            continue


def _places(name: str) -> list[Path]:
    """Return the folders that may hold a library: the cache, or where that cannot be written, a temporary folder.

    Raises:
        OSError: If there is none, or programs are forbidden in all (noexec).
    """
    places: list[Path] = []
    problems: list[str] = []
    for base in (cache_folder, temporary_folder):
        try:
            place = base() / "kernels" / name
        except UserError as error:
            problems.append(str(error))
            continue
        if _is_noexec(place):
            problems.append(
                f"{base()} is on a file system that is mounted noexec: set XDG_CACHE_HOME to another"
            )
        else:
            places.append(place)
    if not places:
        raise OSError("; ".join(problems))
    return list(dict.fromkeys(places))


def _is_noexec(place: Path) -> bool:
    """Say whether no program and no library can be loaded from a folder, or where it would be made."""
    nearest = next((path for path in (place, *place.parents) if path.exists()), place)
    with suppress(OSError):
        return bool(os.statvfs(nearest).f_flag & getattr(os, "ST_NOEXEC", 0))
    return False


def _age_s(path: Path) -> float:
    """Return the seconds since a file was written; infinity if there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def _is_own(path: Path) -> bool:
    """Say whether a file or folder is there and this user's: code of others is not loaded."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _holds(place: Path) -> bool:
    """Make a folder; say whether it is there, this user's, and writable."""
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return place.is_dir() and _is_own(place) and os.access(place, os.W_OK)


def _keep(made: Path, places: Sequence[Path]) -> Path:
    """Move a new library into the first folder that can hold it; a folder may be read-only, or its disk full.

    Raises:
        OSError: If none can.
    """
    problem = OSError("no folder to keep them in")
    for place in filter(_holds, places):
        path = place / LIBRARY
        try:
            with tempfile.TemporaryDirectory(dir=place) as work:
                shutil.copyfile(made, copy := Path(work) / LIBRARY)
                os.replace(copy, path)
        except OSError as error:
            problem = error
            continue
        _note(path, _mark(path), "built")
        return path
    raise problem


def _mark(path: Path) -> str:
    """Return a file's size and hash."""
    content = path.read_bytes()
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}"


def _record(path: Path) -> str:
    """Return what is recorded of a library: the `_mark` of a file that was `built`, or that `passed` its trial."""
    return _read_line(path.with_suffix(".tried"))


def _read_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _note(path: Path, mark: str, status: str) -> None:
    """Record a library's status; where that cannot be written, the next process tries it again."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as work:
        new = Path(work) / "tried"
        new.write_text(f"{mark} {status}\n")
        os.replace(new, path.with_suffix(".tried"))


# Run in a child process: only the library, with PyTorch's OpenMP runtime; a crash there is harmless.
_TRIAL = """
import ctypes, sys
library, runtime, *names = sys.argv[1:]
if runtime:
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
loaded = ctypes.CDLL(library)
test = loaded.whet_selftest
test.restype = ctypes.c_double
print(test(2), *[name for name in names if not hasattr(loaded, name)], flush=True)
"""


def _try(path: Path) -> None:
    """Run the library's self-test in a child process, and record that it passed.

    Raises:
        OSError: If it crashes, computes wrong numbers, or lacks a function.
    """
    source = (Path(__file__).parent / SOURCES[-1]).read_text()
    names = re.findall(r"^EXPORT .*?(whet_\w+)\(", source, flags=re.MULTILINE)
    mark, runtime = _mark(path), str(toolchain.shipped_openmp() or "")
    try:
        done = toolchain.run([sys.executable, "-I", "-c", _TRIAL, str(path), runtime, *names], TRIAL_SECONDS)
    except OSError as error:
        raise OSError(f"a trial of the library {error}") from None
    if done.returncode < 0:
        raise OSError(f"a trial of the library died of signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"its trial ended with status {done.returncode}"]
        raise OSError(lines[-1])
    words = (done.stdout.strip().splitlines() or [""])[-1].split()
    try:
        error = float(words[0])
    except (IndexError, ValueError):
        raise OSError("its own test ended without a result") from None
    if not 0 <= error <= TRIAL_ERROR:
        raise OSError(f"its own test is off by {error:.1e}")
    if len(words) > 1:
        raise OSError(f"it lacks {words[1]}")
    _note(path, mark, "passed")


@cache
def _features() -> frozenset[str]:
    """Return the CPU's feature flags, by their Linux names."""
    if platform.system() == "Darwin":
        names = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
        apple = {"sse4.1": "sse4_1", "sse4.2": "sse4_2", "avx1.0": "avx", "lzcnt": "abm"}
        return frozenset(apple.get(word, word) for word in _sysctl(*names).lower().split())
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _sysctl(*names: str) -> str:
    """Return what macOS says of its hardware; '' where it cannot be asked."""
    try:
        return subprocess.run(
            ["sysctl", "-n", *names], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


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


@cache
def processor_kind() -> str:
    """Return vendor, family, model and name of the CPU: libraries choose their code by them, so bits depend on them.

    A virtual machine may have a name without a number, so the numbers count as well.
    """
    fields: dict[str, str] = {}
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    wanted = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part", "CPU variant")
    found = [fields[name] for name in wanted if fields.get(name)]
    if not found and platform.system() == "Darwin":
        found = [_sysctl("machdep.cpu.brand_string")]
    return " ".join(filter(None, found)) or processor_name()


def processor_name() -> str:
    """Return the CPU's name, as far as the system tells it: measurements of one are not another's."""
    for wanted in ("model name", "CPU part"):
        for line in _cpuinfo():
            if line.startswith(wanted):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
