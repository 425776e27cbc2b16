"""The filter, run by an interpreter of BPF that knows nothing of how it was written."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from pathlib import Path

import pytest
from needs import require

from whet.sandbox.inside.seccomp import ALLOWED, ARCHITECTURES, build_filter

ME = 4321
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", {}),
    "aarch64": (
        "/usr/include/asm-generic/unistd.h",
        {"newfstatat": 79, "lseek": 62, "mmap": 222, "fcntl": 25},
    ),
}


def decide(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """Interpret the filter (net/core/filter.c: LD ABS, JEQ, JGE, AND, RET) on one system call."""
    code = build_filter(ME, machine)
    arch = ARCHITECTURES[machine][0] if arch is None else arch
    data = struct.pack("=IIQ6Q", number, arch, 0, *(list(args) + [0] * 6)[:6])
    program = list(struct.iter_unpack("=HBBI", code))
    accumulator, at = 0, 0
    for _ in range(len(program)):
        operation, if_true, if_false, constant = program[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x15:
            at += if_true if accumulator == constant else if_false
        elif operation == 0x35:
            at += if_true if accumulator >= constant else if_false
        elif operation == 0x54:
            accumulator &= constant
        else:
            assert operation == 0x06
            return constant
    raise AssertionError("the filter does not end")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_number_is_answered_as_the_table_says(machine: str) -> None:
    column = ARCHITECTURES[machine][1]
    allowed = {numbers[column] for numbers in ALLOWED.values()}
    for number in range(600):
        answer = decide(machine, number, 999, 999, 3, 3)
        if number == 435:
            assert answer == ENOSYS
        elif number not in allowed:
            assert answer == EPERM


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    path, others = HEADERS[machine]
    require(path)
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", Path(path).read_text())
    numbers = {name: int(number) for name, number in found} | others
    column = ARCHITECTURES[machine][1]
    assert {n: v[column] for n, v in ALLOWED.items() if v[column] is not None} == {
        n: numbers[n] for n, v in ALLOWED.items() if v[column] is not None
    }


@pytest.mark.parametrize(
    ("name", "args", "is_allowed"),
    [
        ("read", (), True),
        ("openat", (0, 0, os.O_RDONLY | os.O_CLOEXEC), True),
        ("openat", (0, 0, os.O_WRONLY), False),
        ("openat", (0, 0, os.O_RDWR), False),
        ("openat", (0, 0, os.O_RDONLY | os.O_CREAT), False),
        ("openat", (0, 0, os.O_RDONLY | os.O_TRUNC), False),
        ("openat", (0, 0, os.O_PATH), False),
        ("kill", (ME, 9), True),
        ("kill", (ME + 1, 9), False),
        ("kill", (0, 9), False),
        ("kill", (0xFFFFFFFF, 9), False),
        ("tgkill", (ME, 1, 9), True),
        ("tgkill", (ME + 1, 1, 9), False),
        ("clone", (0x3D0F00,), True),
        ("clone", (0x3D0F00 | 1 << 34,), False),
        ("clone", (0x11,), False),
        ("clone", (0x10000000 | 0x3D0F00,), False),
        ("ioctl", (0, 0x5401), True),
        ("ioctl", (0, 0x5412), False),
        ("fcntl", (0, 3), True),
        ("fcntl", (0, 8), False),
        ("prctl", (15,), True),
        ("prctl", (1, 0), False),
        ("prlimit64", (0, 7, 0), True),
        ("prlimit64", (0, 7, 1), False),
        ("prlimit64", (0, 7, 1 << 40), False),
        ("prlimit64", (1, 7, 0), False),
        ("socketpair", (1, 1 | 0o2000000, 0), True),
        ("socketpair", (1, 2, 0), False),
        ("socketpair", (2, 1, 0), False),
        ("sendto", (0, 0, 0, 0, 0), True),
        ("sendto", (0, 0, 0, 0, 1 << 33), False),
    ],
)
@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments(machine: str, name: str, args: tuple[int, ...], is_allowed: bool) -> None:
    number = ALLOWED[name][ARCHITECTURES[machine][1]]
    assert number is not None
    assert decide(machine, number, *args) == (ALLOW if is_allowed else EPERM)


def test_other_architectures_are_killed() -> None:
    assert decide("x86_64", 0, arch=0x40000003) == KILL  # i386
    assert decide("x86_64", 0x40000000) == KILL  # x32
    assert decide("aarch64", 63, arch=0x40000028) == KILL  # arm
    with pytest.raises(OSError, match="riscv64"):
        build_filter(ME, "riscv64")


def test_size_fits_the_kernels_limit() -> None:
    assert len(build_filter(ME, "x86_64")) // 8 < 4096
    assert ctypes.sizeof(ctypes.c_char_p) == 8
