"""Finds C++ compilers and runs them: with a time limit, and never longer than this process lives."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

COMPILERS = {"Darwin": ("clang++", "g++"), "Linux": ("g++", "clang++")}
QUESTION_SECONDS, BUILD_SECONDS = 30, 600
MESSAGE_LENGTH = 200

# Runs a command as the leader of a session of its own. A compiler starts further programs (cc1plus, ld), which would
# survive it; and neither would notice that whet was killed. The whole group ends then.
_KEEPER = """
import os, signal, subprocess, sys
parent, child = int(sys.argv[1]), subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
while True:
    try:
        code = child.wait(0.5)
        break
    except subprocess.TimeoutExpired:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
sys.exit(code if code >= 0 else 128 - code)
"""


def compilers() -> list[str]:
    """Return the C++ compilers in the order in which they are tried: $CXX, g++, clang++ (on macOS clang++ first)."""
    names = (os.environ.get("CXX", ""), *COMPILERS.get(platform.system(), ("g++", "clang++")))
    return list(dict.fromkeys(path for name in names if name and (path := shutil.which(name))))


def compiler() -> str | None:
    """Return the first C++ compiler, if there is one."""
    return next(iter(compilers()), None)


def run(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command with everything that it starts; nothing of it is left after the time limit or without this process.

    Args:
        command: Program and arguments.
        limit_s: Time limit in seconds.

    Returns:
        What it printed, whatever its encoding, and its status (negative: the signal that it died of).

    Raises:
        TimeoutError: If it takes longer.
        OSError: If it cannot be started.
    """
    keeper = [sys.executable, "-I", "-S", "-c", _KEEPER, str(os.getpid()), *command]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        keeper,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as error:  # Ctrl-C too: it does not reach another session
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"timed out after {limit_s:g} s") from None
        raise
    code = process.returncode
    return subprocess.CompletedProcess(command, 128 - code if code > 128 else code, out, err)


def version(cxx: str) -> str:
    """Return what a compiler says about itself.

    Raises:
        OSError: If it fails or takes too long.
    """
    done = run([cxx, "--version"], QUESTION_SECONDS)
    if done.returncode:
        raise OSError(f"--version ended with status {done.returncode}")
    return done.stdout


def shipped_openmp() -> Path | None:
    """Return the OpenMP runtime that PyTorch ships."""
    folder = Path(torch.__file__).parent / "lib"
    return next((path for name in ("libgomp*", "libomp*") for path in sorted(folder.glob(name))), None)


def needed_openmp(cxx: str, about: str) -> Path | None:
    """Return the OpenMP runtime to link with; None if the one that PyTorch ships runs this compiler's code.

    On Linux PyTorch ships g++'s, while clang++ emits calls of its own (`__kmpc_*`).

    Args:
        cxx: The compiler.
        about: Its `version`.

    Raises:
        OSError: If clang++ has none.
    """
    if platform.system() != "Linux" or "clang" not in about:
        return None
    folder = Path(torch.__file__).parent / "lib"
    for found in (path for name in ("libomp*", "libiomp5*") for path in sorted(folder.glob(name))):
        return found
    for name in ("libomp.so", "libiomp5.so"):
        answer = run([cxx, f"-print-file-name={name}"], QUESTION_SECONDS).stdout.strip()
        if os.path.isabs(answer) and os.path.isfile(answer):  # an unknown name comes back as it is
            return Path(os.path.realpath(answer))
    raise OSError("clang++ needs libomp here (apt-get install libomp-dev), or install g++")


def make_library(
    cxx: str, flags: tuple[str, ...], openmp: tuple[str, ...], source: Path, work: Path, runtime: Path | None
) -> Path:
    """Compile and link a library.

    Args:
        cxx: The compiler.
        flags: Its options.
        openmp: Its options for OpenMP, with which it compiles but does not link: PyTorch's runtime is loaded already.
        source: The C++ file.
        work: Folder for object and library.
        runtime: OpenMP runtime to link with.

    Raises:
        OSError: One line that says why the compiler failed.
    """
    is_mac = platform.system() == "Darwin"
    link = ["-dynamiclib", "-undefined", "dynamic_lookup"] if is_mac else ["-shared"]
    made, library = work / "cpu.o", work / "cpu.o.so"
    linked = [] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    for command in (
        [cxx, *flags, *openmp, "-c", str(source), "-o", str(made)],
        [cxx, *link, str(made), *linked, "-o", str(library)],
    ):
        done = run(command, BUILD_SECONDS)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            lines = [line for line in lines if "error" in line] or lines
            raise OSError(lines[0] if lines else f"ended with status {done.returncode}")
    return library


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks, and not too long."""
    return " ".join(str(error).split())[:MESSAGE_LENGTH] or type(error).__name__
