"""What this machine has for a sandbox, found without whet: a fault of ours must fail a test, never skip it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import pytest


def needs_backend(name: str) -> None:
    """Skip where a backend's program, or the kernel's part of it, is missing."""
    if name == "landlock" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no landlock")
    if name == "bwrap":
        if shutil.which("bwrap") is None:
            pytest.skip("no bwrap: apt install bubblewrap")
        spaces = [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts")]
        user = ["--unshare-user"] if os.geteuid() else []
        words = ["bwrap", *spaces, *user, "--ro-bind", "/", "/", "true"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"bwrap may not make namespaces here: {done.stderr.strip()}")
