"""The system calls that model-written Python may make, as a BPF program for the kernel's seccomp.

An allow-list: calls in `ALLOWED` work (some with checks of their arguments), the rest return EPERM. Nothing in it opens
a file for writing, creates a process or a socket that reaches anything, or signals another process.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ARCHITECTURES: Final[Mapping[str, tuple[int, int]]] = {
    "x86_64": (0xC000003E, 0),
    "aarch64": (0xC00000B7, 1),
}
"""Machine -> (its AUDIT_ARCH, its column in the tables of system call numbers)."""

X32_BIT = 0x40000000

ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000

SELF = -1
"""Stands for the process id of the process that installs the filter."""

# Numbers from the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
# fmt: off
ALLOWED: Final[Mapping[str, tuple[int | None, int | None]]] = {
    # open files, opening for reading (see CHECKS), and file metadata
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "close": (3, 57),
    "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None), "statx": (332, 291),
    "lseek": (8, 62), "getcwd": (79, 17), "getdents64": (217, 61), "readlink": (89, None), "readlinkat": (267, 78),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "open": (2, None), "openat": (257, 56),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "ioctl": (16, 29), "fcntl": (72, 25),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "brk": (12, 214),
    "madvise": (28, 233),
    # signals, to the process itself
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "pause": (34, None), "alarm": (37, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "kill": (62, 129), "tgkill": (234, 131),
    # waiting and clocks
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "time": (201, None),
    "gettimeofday": (96, 169), "times": (100, 153),
    # process identity
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156), "uname": (63, 160),
    "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163), "prlimit64": (302, 261), "getcpu": (309, 168),
    "getrandom": (318, 278), "sched_getaffinity": (204, 123), "prctl": (157, 167),
    # threads
    "clone": (56, 220), "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "rseq": (334, 293), "sched_yield": (24, 124), "membarrier": (324, 283), "exit": (60, 93), "exit_group": (231, 94),
    # the socket pair that wakes an asyncio event loop
    "socketpair": (53, 199), "sendto": (44, 206), "recvfrom": (45, 207), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209), "shutdown": (48, 210),
}
# fmt: on

CLONE3 = 435
"""Returns ENOSYS: its flags are in memory, which a filter cannot read; the C library then calls clone."""

CLONE_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""Exactly what glibc's and musl's pthread_create pass: a thread, never a process or a namespace."""

O_WRITES = 0o3 | 0o100 | 0o1000 | 0o10000000 | 0o20000000
"""Any of O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_PATH, O_TMPFILE."""


@dataclass(frozen=True, slots=True)
class Check:
    """A system call is allowed only if a masked argument has one of these values.

    Attributes:
        index: Which argument, from 0.
        values: What it may be; `SELF` is the caller's own process id.
        mask: Bits of the low 32 that are compared.
        is_wide: Whether the high 32 bits must be zero (pointers and longs; an int has none).
    """

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    is_wide: bool = False


CHECKS: Final[Mapping[str, tuple[Check, ...]]] = {
    "open": (Check(1, (0,), O_WRITES),),
    "openat": (Check(2, (0,), O_WRITES),),
    # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
    "ioctl": (Check(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    # F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC F_GETPIPE_SZ F_GET_SEALS; no F_SETOWN, no locks
    "fcntl": (Check(1, (0, 1, 2, 3, 4, 1030, 1032, 1034)),),
    "kill": (Check(0, (SELF,)),),
    "tgkill": (Check(0, (SELF,)),),
    "getpgid": (Check(0, (0, SELF)),),
    "getsid": (Check(0, (0, SELF)),),
    "sched_getaffinity": (Check(0, (0, SELF)),),
    "get_robust_list": (Check(0, (0,)),),
    "prlimit64": (Check(0, (0, SELF)), Check(2, (0,), is_wide=True)),
    # PR_SET_NAME PR_GET_NAME PR_SET_VMA
    "prctl": (Check(0, (15, 16, 0x53564D41)),),
    "clone": (Check(0, CLONE_THREAD_FLAGS, is_wide=True),),
    # AF_UNIX, SOCK_STREAM with or without SOCK_NONBLOCK and SOCK_CLOEXEC; no address to send to
    "socketpair": (Check(0, (1,)), Check(1, (1,), 0xFFFFFFFF ^ 0o2004000)),
    "sendto": (Check(4, (0,), is_wide=True),),
}

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, constant: a struct sock_filter."""


def build_filter(pid: int, machine: str = "") -> bytes:
    """Write the filter as the array of struct sock_filter that the kernel takes.

    Args:
        pid: Process id of the process that will install it, the only one that it may signal.
        machine: A key of `ARCHITECTURES`; '' for this machine.

    Returns:
        8 bytes per instruction.

    Raises:
        OSError: If the machine is not in the table.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"no table of system calls for {machine} (there is one for {', '.join(ARCHITECTURES)})")
    arch, column = ARCHITECTURES[machine]
    deny = (_RETURN, 0, 0, ERRNO | errno.EPERM)
    allow = (_RETURN, 0, 0, ALLOW)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, X32_BIT),
        (_RETURN, 0, 0, KILL),
        (_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, ERRNO | errno.ENOSYS),
    ]
    for name, numbers in ALLOWED.items():
        number = numbers[column]
        if number is not None:
            block = [i for check in CHECKS.get(name, ()) for i in _block(check, pid, deny)]
            program += [(_EQUAL, 0, len(block) + 1, number), *block, allow]
    program.append(deny)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _block(check: Check, pid: int, deny: Instruction) -> Sequence[Instruction]:
    """Return instructions that fall through if the argument passes, and deny otherwise."""
    offset = _ARGUMENTS + 8 * check.index
    values = [pid if value == SELF else value for value in check.values]
    block: list[Instruction] = []
    if check.is_wide:
        block += [(_LOAD, 0, 0, offset + 4), (_EQUAL, 1, 0, 0), deny]
    block.append((_LOAD, 0, 0, offset))
    if check.mask != 0xFFFFFFFF:
        block.append((_AND, 0, 0, check.mask))
    block += [(_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)]
    return [*block, deny]
