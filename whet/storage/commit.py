"""Atomic folders: written completely or not at all, and verified before use."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from whet.kernels import dispatch
from whet.kernels.cpu.build import processor_kind
from whet.ranks.collectives import world_size
from whet.types import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
STEERING = ("MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_")
"""Beginnings of variables that steer libraries of matrix products (ATEN_CPU_CAPABILITY shows in the capability)."""
NOT_STEERING = ("VERBOSE", "CACHE", "JIT", "PROFILE", "DUMP", "NUM_THREADS", "MEMORY", "ROOT")
"""Parts of the names of those that change no result."""
DYNAMIC = ("OMP_DYNAMIC", "OMP_THREAD_LIMIT")
"""Variables by which a sum gets fewer threads than the run asks for."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors that reading untrusted JSON may raise."""
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class DiskFullError(UserError):
    """The disk is full; nothing that was saved before is lost."""


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of any new file; the library alone makes it its owner's.

    Args:
        tensors: The tensors, contiguous and not shared.
        path: The file.
        metadata: What its header says.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    with suppress(OSError):  # a file system without permissions
        path.chmod(mode)


def recover(parent: Path) -> None:
    """Clean up what killed writers left in a folder of committed folders.

    A folder that was moved away for a successor that never came gets its name back; half-written and half-removed ones
    are deleted.

    Args:
        parent: Folder of the committed folders; may be missing. No process may be writing to it.
    """
    for path in sorted(parent.glob(".old-*")):
        if not (final := parent / path.name.removeprefix(".old-").rpartition("-")[0]).exists():
            path.rename(final)
    for path in [*parent.glob(".old-*"), *parent.glob(".tmp-*")]:
        shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path, *, mark: str = "corrupt") -> Path:
    """Rename a folder so that nothing uses it but a person can inspect it; return its new name."""
    aside = folder.with_name(f".{mark}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def remove(folder: Path) -> None:
    """Delete a committed folder; killed halfway, it leaves no folder that looks complete."""
    doomed = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _beside(final: Path, after: str) -> Iterator[Path]:
    """Make a hidden sibling to write into; after an error it is removed.

    Args:
        final: The folder that it will become.
        after: What to say behind an error of the disk.

    Raises:
        UserError: If it cannot be written (DiskFullError if the disk is full).
    """
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0][:120]
        is_full = getattr(error, "errno", None) in FULL or "No space" in reason
        text = f"{final}: could not be written ({reason}); {after}"
        raise (DiskFullError if is_full else UserError)(text) from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Write a folder for other programs, which appears under its name only when all of it is there.

    After an error nothing is left; what a killed process left goes with the next try.

    Args:
        final: The name; nothing is there yet.

    Yields:
        The sibling to write into.

    Raises:
        UserError: If the folder cannot be written (DiskFullError if the disk is full).
    """
    stem = f".tmp-{final.name}-"
    for path in final.parent.glob(f"{glob.escape(stem)}*"):
        number = path.name.removeprefix(stem)
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)
    with _beside(final, "nothing is left of it: free space, or name another folder with --out") as temporary:
        yield temporary
        temporary.rename(final)


@contextmanager
def commit_folder(final: Path) -> Iterator[Path]:
    """Write a folder that appears under its name only when it is complete.

    Files go to a temporary sibling; on success a manifest with size and SHA-256 of each is added, everything
    is synced to disk, and the folder is renamed. After an error the temporary folder is removed and nothing has
    changed. `recover` cleans up after a killed process.

    Args:
        final: The name; an older folder of that name is replaced.

    Yields:
        The temporary folder to write into.

    Raises:
        UserError: If the folder cannot be written (DiskFullError if the disk is full); nothing that was saved before is
            lost.
    """
    with _beside(final, "what was saved before is intact: free space, then --resume") as temporary:
        yield temporary
        files = {}
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                entry = {"size": path.stat().st_size, "sha256": digest(path)}
                files[str(path.relative_to(temporary))] = entry
                sync(path)
        manifest = {"format": FORMAT_VERSION, **machine(), "files": files}
        manifest["sha256"] = _seal(manifest)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        sync(temporary / MANIFEST)
        for inner in (path for path in temporary.rglob("*") if path.is_dir()):
            sync(inner)  # the names in it
        sync(temporary)
        if final.exists():
            retired = final.with_name(f".old-{final.name}-{os.getpid()}")
            shutil.rmtree(retired, ignore_errors=True)
            final.rename(retired)
            temporary.rename(final)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            temporary.rename(final)
        sync(final.parent)


def machine() -> dict[str, Any]:
    """Return what, apart from program and data, the last bits of a result depend on."""
    return {
        "threads": torch.get_num_threads(),
        "kernels": dispatch.identity(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_kind(),
        "variables": _steering(),
        "ranks": world_size(),
    }


def _steering() -> dict[str, str]:
    """Return the environment's variables that choose the code of MKL, oneDNN, OpenBLAS or libm, and so the last bits.

    Thread counts are not among them: PyTorch takes them over into its own, which is compared by itself.
    """
    found: dict[str, str] = {}
    for name, value in sorted(os.environ.items()):
        steers = name.startswith(STEERING) and not any(word in name for word in NOT_STEERING)
        if value and (steers or name in DYNAMIC or (name == "GLIBC_TUNABLES" and "hwcaps" in value)):
            found[name.replace("DNNL_", "ONEDNN_", 1) if name.startswith("DNNL_") else name] = value
    return found


def digest(path: Path, size: int = sys.maxsize) -> str:
    """Return the sha256 of a file's first `size` bytes."""
    running = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, 1 << 20))):
            running.update(data)
            size -= len(data)
    return running.hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's own content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_folder(folder: Path) -> None:
    """Check every file of a committed folder against its manifest.

    Raises:
        UserError: If the manifest or a file is missing, one differs, or there is a file that is not in the manifest.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format"], manifest["files"]
        is_whole = manifest.pop("sha256", None) in (None, _seal(manifest))  # earlier versions have none
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except UNREADABLE as error:
        raise UserError(f"{folder / MANIFEST}: no readable manifest ({type(error).__name__})") from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{folder}: manifest.json has format {str(version)[:20]!r}, this whet reads {FORMAT_VERSION}"
        )
    if not is_whole or not expected:
        raise UserError(f"{folder / MANIFEST}: not as it was written (corrupt)")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {MANIFEST}
    if unnamed := sorted(found - expected.keys()):
        raise UserError(f"{folder / unnamed[0]}: the manifest does not name it (corrupt)")
    for name, (size, written) in expected.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing, though the manifest names it")
        if path.stat().st_size != size or digest(path) != written:
            raise UserError(f"{path}: differs from its manifest (corrupt)")
