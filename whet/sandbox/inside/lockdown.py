"""Restrictions that a child applies to itself before it runs model-written code: limits, user, files, system calls."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable
from typing import Any, cast

from whet.sandbox.inside.seccomp import build_filter

try:  # loaded before the sandbox closes; importing this on another system needs no library
    import resource
except ImportError:
    resource = cast(Any, None)

NOBODY = 65534
MAX_FDS = 128
MAX_STACK_BYTES = 64 << 20

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3

# Bits of file rights, network rights and scopes that landlock supports from this version on.
_FILE_BITS = ((1, 13), (2, 14), (3, 15), (5, 16))
_NETWORK_VERSION, _SCOPE_VERSION = 4, 6

_libc = ctypes.CDLL(None, use_errno=True)


class _SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _call(function: str, *arguments: object) -> int:
    """Call the C library; raise OSError if it returns -1."""
    result = getattr(_libc, function)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}{arguments[:1]}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int, pointer: object = 0) -> None:
    _call("prctl", option, ctypes.c_ulong(value), pointer, 0, 0)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def landlock_version() -> int:
    """Return this kernel's landlock version; 0 without landlock."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    return max(0, version)


def make_ruleset(readable: Iterable[str], listable: Iterable[str]) -> int:
    """Make a landlock ruleset under which only some files can be read and none written.

    Args:
        readable: Files, and folders with their contents; missing ones are skipped.
        listable: Folders whose names, at any depth, can be listed.

    Returns:
        Its file descriptor.

    Raises:
        OSError: If the kernel has no landlock.
    """
    version = landlock_version()
    if version == 0:
        raise OSError("this kernel has no landlock")
    attributes = struct.pack("=Q", (1 << max(bits for least, bits in _FILE_BITS if version >= least)) - 1)
    if version >= _NETWORK_VERSION:
        attributes += struct.pack("=Q", 3)
    if version >= _SCOPE_VERSION:
        attributes += struct.pack("=Q", 3)
    ruleset = _call("syscall", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    rules = [
        *((path, _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE) for path in readable),
        *((path, _READ_DIR) for path in listable),
    ]
    for path, allowed in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = struct.pack("=Qi", allowed, descriptor)
        _call("syscall", _LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(descriptor)
    return ruleset


def is_open_to_all(folder: str) -> bool:
    """Say whether every user can list and read a folder, and enter all folders above it."""
    parts = os.path.realpath(folder).split("/")
    above = ("/".join(parts[:count]) or "/" for count in range(1, len(parts)))
    return os.stat(folder).st_mode & 0o5 == 0o5 and all(os.stat(path).st_mode & 0o1 for path in above)


def drop_privileges(*, leaves_root: bool) -> None:
    """Drop every capability; if asked to and allowed by the kernel, stop being root, too.

    Args:
        leaves_root: Whether an unprivileged user can still read what a program imports. Root without capabilities is
            confined by landlock and seccomp as any other user is.

    Raises:
        OSError: If the capabilities cannot be dropped.
    """
    if leaves_root and os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:  # a container whose root may not change users, or without such a user
            pass
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _call("syscall", _CAPSET[os.uname().machine], header, none)


def set_limits(memory_bytes: int, cpu_s: int) -> None:
    """Set resource limits of this process; they cannot be raised again.

    Args:
        memory_bytes: Address space in all.
        cpu_s: CPU seconds over all cores until SIGXCPU; SIGKILL one second later.
    """
    for limit, soft, hard in (
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES, MAX_STACK_BYTES),
        (resource.RLIMIT_NOFILE, MAX_FDS, MAX_FDS),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent ends; call it after a change of user, which resets it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def apply_filters(ruleset: int) -> None:
    """Apply landlock (if available) and the system call filter; irreversible.

    Args:
        ruleset: From `make_ruleset`; -1 for none.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if ruleset >= 0:
        _call("syscall", _LANDLOCK_RESTRICT, ruleset, 0)
        os.close(ruleset)
    code = build_filter(os.getpid())
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_SockFprog(len(code) // 8, code)))
