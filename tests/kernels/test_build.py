"""Building the CPU kernels where something is wrong: the cache, the library in it, the compiler."""

from __future__ import annotations

import errno
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from late import wait_for
from needs import C_COMPILERS, needs, program

from whet.config import cache_folder, temporary_folder, user_path
from whet.kernels import dispatch
from whet.kernels.cpu import build, toolchain
from whet.telemetry.provenance import describe_model
from whet.types import UserError

CC = program(*C_COMPILERS)
pytestmark = needs("c compiler")
SOURCE = (Path(build.__file__).parent / "cpu.cpp").read_text()
NAMES = set(re.findall(r"\b(whet_\w+)\(", SOURCE)) - {"whet_selftest"}
STUBS = "".join(f"void {name}(void) {{}}\n" for name in sorted(NAMES))
PASSES = "double whet_selftest(int threads) { return 0; }\n"

Load = Callable[..., build._Loaded]


@needs("c++ compiler")
def test_a_compiler_that_is_found_builds_the_kernels() -> None:
    """Other tests skip without kernels; they must not skip because the kernels are broken."""
    assert build.library() is not None or build.reason() == "eager: WHET_KERNELS=eager", build.reason()


def c_library(path: Path, code: str) -> Path:
    path.with_suffix(".c").write_text(code)
    assert CC is not None
    subprocess.run([CC, "-shared", "-fPIC", str(path.with_suffix(".c")), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with every function that passes its own test."""
    return c_library(tmp_path_factory.mktemp("good") / "good.so", PASSES + STUBS)


@pytest.fixture
def compiles(tmp_path: Path) -> Callable[..., Path]:
    """Make a compiler that delivers a library, notes that it ran, and first does something else."""

    def make(library: Path | str, first: str = "", name: str = "fake++", about: str = "fake 1.0") -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"#!/bin/sh\n[ \"$1\" = --version ] && printf '{about}\\n' && exit 0\n"
            f'case "$1" in -print-file-name=*) echo "${{1#*=}}"; exit 0;; esac\n'
            f"echo $$ >> {tmp_path}/{name}.ran\n{first}\n"
            'while [ $# -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
            f'cp {library} "$out"\n'
        )
        path.chmod(0o755)
        return path

    return make


def home(found: build._Loaded) -> Path:
    assert found.folder is not None, found.reason
    return found.folder


def runs(tmp_path: Path, name: str = "fake++") -> int:
    """Return how often a compiler ran: twice for a library, to compile and to link."""
    file = tmp_path / f"{name}.ran"
    return len(file.read_text().split()) if file.exists() else 0


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the kernels as a new process does, with these compilers alone, and caches below `tmp_path`."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WHET_KERNELS", "auto")
    monkeypatch.delenv(build.VARIABLE, raising=False)

    def loaded(*compilers: Path) -> build._Loaded:
        monkeypatch.setattr(toolchain, "compilers", lambda: [str(path) for path in compilers])
        return build._load.__wrapped__()

    return loaded


def test_without_a_cache_one_private_folder_is_used_again_and_the_identity_is_the_same(
    load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = compiles(good)
    cached = load(fake)
    assert cached.reason == f"C++, {home(cached).name}"
    assert not (tmp_path / "tmp" / f"whet-{os.getuid()}" / "kernels").exists(), "not needed"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first, second = load(fake), load(fake)
    assert first.reason == second.reason == cached.reason
    assert first.folder == second.folder == temporary_folder() / "kernels" / home(cached).name
    assert runs(tmp_path) == 4, "one library for the cache, one without it"
    assert temporary_folder().stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == [f"whet-{os.getuid()}"]


@pytest.mark.parametrize("trap", ["symlink", "open to others", "file"])
def test_a_temporary_folder_that_others_control_is_refused(
    trap: str, load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "tmp" / f"whet-{os.getuid()}"
    if trap == "symlink":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif trap == "file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(UserError, match="is not a folder that only this user can open"):
        temporary_folder()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = load(compiles(good))
    assert found.library is None
    assert "no folder to keep them in" in found.reason
    assert runs(tmp_path) == 0, "not compiled for nothing"


def test_a_user_without_a_home_has_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def no_account(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", no_account)
    assert cache_folder() == tmp_path / f"whet-{os.getuid()}"
    assert user_path("~/model") == Path("~/model")
    assert describe_model("some/model")["folder"] is None


@pytest.mark.parametrize("places", ["cache", "both"])
def test_a_file_system_without_programs_is_passed_over(
    places: str, load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path, monkeypatch
) -> None:
    """Otherwise each start would compile, and load nothing."""
    barred = tmp_path / ("cache" if places == "cache" else "")
    monkeypatch.setattr(build, "_is_noexec", lambda place: place.is_relative_to(barred))
    found = load(compiles(good))
    if places == "cache":
        assert home(found).parent == tmp_path / "tmp" / f"whet-{os.getuid()}" / "kernels"
    else:
        assert "mounted noexec: set XDG_CACHE_HOME" in found.reason
        assert runs(tmp_path) == 0


def test_a_mount_option_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = os.statvfs(tmp_path).f_flag
    assert build._is_noexec(tmp_path / "not/yet") == bool(flags & os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_RDONLY))
    assert build._is_noexec(tmp_path / "not/yet")


def test_without_a_compiler_a_library_that_lies_ready_is_used(
    load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load().reason.startswith("eager: no C++ compiler")
    built = load(compiles(good))
    found = load()
    assert found.library is not None
    assert (found.reason, found.failed) == (built.reason, ())
    broken = load(compiles("/dev/null", first="exit 1", name="broken++", about="broken 1.0"))
    assert broken.reason == built.reason
    assert broken.failed[0].startswith("broken++: ")
    with monkeypatch.context() as patch:
        patch.setattr(build, "_processor", lambda: "another")
        assert load().library is None
    library = home(built) / build.LIBRARY
    library.write_bytes(library.read_bytes() + b"x")  # not the file that passed its trial
    assert load().library is None


def test_what_a_killed_build_left_goes_with_the_next(
    load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"whet-build-{number}-abc" for number in (ended.pid, os.getpid())]
    for name in names:
        (tmp_path / "tmp" / name).mkdir()
    load(compiles(good))
    assert [name for name in names if (tmp_path / "tmp" / name).exists()] == names[1:]


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign"])
@pytest.mark.parametrize("tried", [True, False])
def test_a_damaged_library_is_rebuilt_once(
    damage: str, tried: bool, load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path
) -> None:
    fake = compiles(good)
    folder = home(load(fake))
    path = folder / build.LIBRARY
    new = tmp_path / "damaged.so"
    if damage == "foreign":
        c_library(new, "int something_else;")
    else:
        new.write_bytes(good.read_bytes()[: 5000 if damage == "truncated" else 0])
    os.replace(new, path)  # another inode: this process has the old one mapped
    if not tried:
        (folder / "cpu.tried").unlink()
    for _ in range(2):
        found = load(fake)
        assert found.library is not None, found.reason
        assert runs(tmp_path) == 4
    assert path.read_bytes() == good.read_bytes()


def test_what_an_earlier_version_built_is_tried_and_not_built_again(
    load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path
) -> None:
    fake = compiles(good)
    folder = home(load(fake))
    (folder / "cpu.tried").write_text("")
    assert load(fake).folder == folder
    assert runs(tmp_path) == 2
    assert (folder / "cpu.tried").read_text().endswith(" passed\n")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("double whet_selftest(int n) { return -1; }" + STUBS, "its own test is off by -1.0e+00"),
        ("double whet_selftest(int n) { return 0.0 / 0.0; }" + STUBS, "its own test is off by"),
        (
            "#include <stdlib.h>\n__attribute__((constructor)) void f() { exit(0); }" + PASSES + STUBS,
            "without a result",
        ),
        (PASSES, "it lacks whet_"),
    ],
)
def test_only_a_small_error_of_a_whole_library_passes_and_a_bad_compiler_is_not_asked_again(
    code: str, said: str, load: Load, compiles: Callable[..., Path], tmp_path: Path
) -> None:
    fake = compiles(c_library(tmp_path / "bad.so", code))
    for _ in range(2):
        found = load(fake)
        assert found.library is None
        assert said in found.reason
        assert runs(tmp_path) == 2, "it would only make the same library again"


def test_the_next_compiler_is_tried_and_the_first_ones_failure_is_told(
    load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kmp = c_library(
        tmp_path / "kmp.so", "void __kmpc_fork_call();" + PASSES.replace("0;", "(__kmpc_fork_call(), 0);")
    )
    unloadable = compiles(kmp, name="first++", about="first 1.0")
    fails = "echo 'x.cpp:1: error: no such thing' >&2; exit 1"
    broken = compiles("/dev/null", first=fails, name="second++", about="second 1.0")
    found = load(unloadable, broken, compiles(good))
    assert found.library is not None
    assert len(found.failed) == 2
    assert "__kmpc_fork_call" in found.failed[0]
    assert found.failed[1] == "second++: x.cpp:1: error: no such thing"
    monkeypatch.setattr(build, "_load", lambda: found)
    monkeypatch.setattr(build, "instruction_set", lambda: "avx2")
    assert dispatch.describe(dispatch.Choice()).startswith("C++ avx2 (not built with first++: ")
    assert dispatch.identity() == found.reason, "only the library counts"


@needs("linux")  # PyTorch ships libomp on macOS
def test_clang_without_its_openmp_is_told_what_it_needs_and_not_started(
    load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clang = compiles(good, name="clang++", about="Debian clang version 14.0.6")
    found = load(clang)
    assert found.library is None
    assert "clang++ needs libomp here (apt-get install libomp-dev), or install g++" in found.reason
    assert runs(tmp_path, "clang++") == 0
    libomp = c_library(tmp_path / "libomp.so", "int omp;")
    clang.write_text(clang.read_text().replace('echo "${1#*=}"', f"echo {libomp}"))
    clang.write_text(clang.read_text().replace("echo $$", 'echo "$@"'))
    assert load(clang).library is not None
    assert str(libomp) in (tmp_path / "clang++.ran").read_text(), "linked with its own"


@pytest.mark.parametrize(
    ("first", "about", "said"),
    [
        ("printf 'Fehler: \\344\\366 error\\n' >&2; exit 1", "fake", "Fehler: �� error"),
        ("exit 1", "fake \\374ber", "ended with status 1"),
        ("printf ' \\n\\n' >&2; exit 3", "fake", "ended with status 3"),
        ("printf 'error: a\\t  b\\n' >&2; exit 1", "fake", "fake++: error: a b)"),
    ],
)
def test_whatever_a_compiler_prints_gives_one_line(
    first: str, about: str, said: str, load: Load, compiles: Callable[..., Path]
) -> None:
    found = load(compiles("/dev/null", first=first, about=about))
    assert found.library is None
    assert said in found.reason
    assert len(found.reason.splitlines()) == 1


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs("linux")
def test_a_compiler_that_hangs_ends_with_its_children(
    load: Load, compiles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "BUILD_SECONDS", 1)
    fake = compiles("/dev/null", first=f"sleep 600 & echo $! > {tmp_path}/child; wait")
    found = load(fake)
    assert found.reason.endswith("(fake++: timed out after 1 s)")
    pids = [int((tmp_path / name).read_text()) for name in ("fake++.ran", "child")]
    assert wait_for(lambda: not any(map(alive, pids)))
    assert "timed out; it is tried again a day later" in load(fake).reason
    assert runs(tmp_path) == 1, "not ten minutes at every start"
    (slow,) = tmp_path.glob("cache/**/too_slow")
    os.utime(slow, (0, 0))
    assert load(fake).reason.endswith("(fake++: timed out after 1 s)")


@needs("linux")
def test_no_compiler_survives_a_process_that_is_killed(compiles: Callable[..., Path], tmp_path: Path) -> None:
    child = tmp_path / "child"
    fake = compiles("/dev/null", first=f"sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait")
    code = "import sys; from whet.kernels.cpu import toolchain; toolchain.run(sys.argv[1:], 300)"
    process = subprocess.Popen([sys.executable, "-c", code, str(fake)], cwd=Path(build.__file__).parents[3])
    try:
        assert wait_for(child.exists)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    pids = [int((tmp_path / name).read_text()) for name in ("fake++.ran", "child")]
    assert wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("problem", ["another user's", "read-only", "full"])
def test_a_cache_that_cannot_be_used_is_replaced(
    problem: str, load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path, monkeypatch
) -> None:
    cache = tmp_path / "cache"

    def is_in_cache(path: object) -> bool:
        return str(path).startswith(f"{cache}/whet/kernels/")

    if problem == "another user's":
        is_own = build._is_own
        monkeypatch.setattr(build, "_is_own", lambda path: not is_in_cache(path) and is_own(path))
    elif problem == "read-only":
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, kind: not is_in_cache(path) and access(path, kind))
    else:
        copy = shutil.copyfile

        def full(source: Path, target: Path) -> object:
            if is_in_cache(target):
                raise OSError(errno.ENOSPC, "No space left on device")
            return copy(source, target)

        monkeypatch.setattr(shutil, "copyfile", full)
    fake = compiles(good)
    for _ in range(2):
        assert home(load(fake)).parent == temporary_folder() / "kernels"
    assert runs(tmp_path) == 2
    assert not list(cache.rglob("*.so"))


def test_a_library_whose_trial_cannot_be_recorded_is_used(
    load: Load, compiles: Callable[..., Path], good: Path, tmp_path: Path
) -> None:
    fake = compiles(good)
    folder = home(load(fake))
    (folder / "cpu.tried").unlink()
    (folder / "cpu.tried").mkdir()
    assert load(fake).library is not None
    assert runs(tmp_path) == 2
