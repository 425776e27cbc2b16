"""Instruction sets: what may be asked for, what a bad build ends in, and the kernels' own test on each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import C_COMPILERS, require
from needs import program as find_program

from whet.kernels.cpu import build, toolchain
from whet.types import UserError

HOME = Path(build.__file__).parent
MAIN = """
#include "selftest.h"
#include <cstdio>
int main() { printf("%s %.3e", INSTRUCTION_SET, selftest::run(2)); return 0; }
"""
NAMES = {
    "x86-64-v2": "sse4.2",
    "x86-64-v3": "avx2",
    "x86-64-v4": "avx512",
    "x86-64-v4-bf16": "avx512-bf16",
    "armv8-a": "neon",
}


def test_every_target_has_a_name() -> None:
    assert NAMES.keys() == build.TARGETS.keys()


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, "x86-64-v9")
    with pytest.raises(
        UserError, match="WHET_KERNELS_ARCH = 'x86-64-v9': expected native or one of x86-64-v2"
    ):
        build.arch()
    monkeypatch.setenv("WHET_KERNELS", "eager")
    with pytest.raises(UserError, match="WHET_KERNELS_ARCH = 'x86-64-v9'"):
        build._load.__wrapped__()


def test_a_target_that_this_cpu_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_features", lambda: frozenset({*build.TARGETS["x86-64-v2"].needs}))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    assert build.runnable() == ["x86-64-v2"]
    monkeypatch.setenv(build.VARIABLE, "x86-64-v3")
    lacks = "abm avx avx2 bmi1 bmi2 f16c fma movbe"
    with pytest.raises(UserError, match=f"cannot run it .it lacks {lacks}.: use one of native, x86-64-v2$"):
        build.arch()
    monkeypatch.setenv(build.VARIABLE, "armv8-a")
    with pytest.raises(UserError, match="it lacks an aarch64 machine"):
        build.arch()


@pytest.mark.ci
def test_the_refusal_is_one_line_and_status_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "whet", "sft", "demo", "--num-steps", "1", "--out", str(tmp_path / "run")]
    environment = os.environ | {build.VARIABLE: "vax", "WHET_KERNELS": "auto"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("whet: error: WHET_KERNELS_ARCH = 'vax'")
    assert done.stderr.count("\n") == 1


# A compiler that makes a library which kills its process, or which computes wrong numbers.
FAKE = """#!/bin/sh
[ "$1" = --version ] && echo "fake {body}" && exit 0
while [ $# -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done
echo '{body}' > "$out.c"
exec {real} -shared -fPIC -x c "$out.c" -o "$out"
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("#include <stdlib.h>\ndouble whet_selftest(int n) { abort(); }", "died of signal 6"),
        ("double whet_selftest(int n) { return 0.5; }", "its own test is off by 5.0e-01"),
        ("int something_else;", "whet_selftest"),
    ],
)
def test_a_bad_library_never_reaches_a_run(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("c compiler")
    real = find_program(*C_COMPILERS)
    fake = tmp_path / "fake++"
    fake.write_text(FAKE.format(body=body.replace("\n", "\\n"), real=real))
    fake.chmod(0o755)
    monkeypatch.setattr(toolchain, "COMPILERS", dict.fromkeys(toolchain.COMPILERS, ()))  # no other is tried
    environment = {"CXX": str(fake), "XDG_CACHE_HOME": str(tmp_path), "WHET_KERNELS": "auto"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    library, reason, *_ = build._load.__wrapped__()  # as in a process that has not loaded them yet
    assert library is None
    assert reason.startswith("eager: the kernels could not be built")
    assert said in reason


@pytest.mark.ci
@pytest.mark.parametrize(
    "target",
    [pytest.param(t, marks=[pytest.mark.slow] * (t in ("x86-64-v2", "x86-64-v4"))) for t in build.TARGETS],
)
def test_the_kernels_own_test(target: str, tmp_path: Path) -> None:
    """Compiled for each target; run where this CPU can, under qemu for ARM, and otherwise left at compiling."""
    is_arm = target == "armv8-a"
    here = target in build.runnable()
    cross = "aarch64-linux-gnu-g++" if is_arm and not here else toolchain.compiler()
    require("arm compiler" if is_arm and not here else "c++ compiler")
    assert cross is not None
    source, program = tmp_path / "main.cpp", tmp_path / "program"
    source.write_text(MAIN)
    emulated = is_arm and not here
    words = [cross, *build.flags(target), "-fopenmp", f"-I{HOME}", str(source), "-o", str(program)]
    # What is not run is compiled without the optimiser's passes: it takes half of the time.
    words += [] if here or emulated else ["-O1"]
    compiled = subprocess.run([*words, *(["-static"] if emulated else [])], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    if not (here or emulated):
        return  # that it compiles is all that this CPU can show
    if emulated:
        require("arm emulator")
    emulator = [find_program("qemu-aarch64")] if emulated else []
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    name, error = done.stdout.split()
    assert name == NAMES[target]
    assert float(error) <= build.TRIAL_ERROR


@pytest.mark.slow
def test_no_inner_loop_of_a_product_touches_its_sums_in_memory(tmp_path: Path) -> None:
    """The fault that made AVX2 30 times slower, seen in the machine code: sums stored at every step of the loop."""
    cxx = toolchain.compiler()
    require("c++ compiler", "x86")
    assert cxx is not None
    source = tmp_path / "gemm.cpp"
    source.write_text(
        '#include "gemm.h"\n'
        "void f(const float* a, long M, long K, const Weight* w, int threads) {\n"
        "  gemm<float, float>(a, K, M, K, w, 1, threads); }\n"
    )
    # SSE without multiply-adds has one register too few: a weight goes to memory there, which costs little.
    for target, register in (("x86-64-v3", "%ymm"), ("x86-64-v4", "%zmm")):
        out = tmp_path / f"{target}.s"
        subprocess.run(
            [cxx, *build.flags(target), f"-I{HOME}", "-S", str(source), "-o", str(out)], check=True
        )
        loops = [
            loop for loop in inner_loops(out.read_text()) if sum(is_multiply(line) for line in loop) >= 4
        ]
        assert len(loops) >= 6, f"{target}: {len(loops)} loops of multiplications found"
        for loop in loops:
            stores = [line for line in loop if is_store(line) and register in line]
            places = {line.split(",", 1)[1] for line in stores}
            assert len(places) <= 2, f"{target}: {sorted(places)}"  # a weight may go to memory, sums may not


def is_store(line: str) -> bool:
    return line.split()[0].startswith(("vmov", "mov")) and line.endswith(")")


def is_multiply(line: str) -> bool:
    return line.split()[0].startswith(("vfmadd", "mulps", "vmulps"))


def inner_loops(text: str) -> list[list[str]]:
    """Return the instructions of each loop that has no other loop inside."""
    lines = [line.strip() for line in text.splitlines()]
    places = {
        line[:-1]: number for number, line in enumerate(lines) if line.startswith(".L") and line.endswith(":")
    }
    found = []
    for number, line in enumerate(lines):
        words = line.split()
        if len(words) == 2 and words[0].startswith("j") and places.get(words[1], number) < number:
            body = lines[places[words[1]] + 1 : number]
            if not any(other.endswith(":") for other in body):
                found.append([row for row in body if row and not row.startswith(".")])
    return found


def test_a_comment_makes_no_other_library_and_code_does() -> None:
    """A run is bound to its library: a word in a comment must not keep it from resuming."""
    source = b"int f(int x) {  // twice\n  return 2 * x; /* a\n note */\n}\n"
    assert build._code(source) == build._code(b"int f(int x) {\n  return 2 * x;\n}")
    assert build._code(source) != build._code(source.replace(b"2 * x", b"3 * x"))
    for name in build.SOURCES:
        assert build._code((HOME / name).read_bytes())
