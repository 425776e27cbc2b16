"""Run folders and checkpoints: written whole or not at all, verified before use; tensors and JSON only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from whet.types import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


# What a run that ended before its first result leaves behind; the next one may take its place.
BEGINNINGS = frozenset(
    {"config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "provenance.json"}
)
# What stays good for the next run in the folder: scores that were paid for.
REUSABLE = frozenset({"judge.jsonl"})


def open_run(folder: Path, config_yaml: str, *, resume: bool = False, resumable: bool = True) -> None:
    """Make a new run folder with its config.yaml, or check that an old one may go on.

    A folder in which an earlier run ended before it had a result counts as new.

    Args:
        folder: The run folder.
        config_yaml: The resolved configuration.
        resume: Whether the run goes on from its newest checkpoint.
        resumable: Whether the program knows --resume, for the message.

    Raises:
        UserError: If the folder exists without `resume`, is missing with it, or holds another configuration.
    """
    path = folder / "config.yaml"
    if resume:
        if not path.is_file():
            raise UserError(
                f"{folder}: nothing to resume (no config.yaml); leave out --resume to start a new run"
            )
        stored = path.read_text(encoding="utf-8")
        if stored != config_yaml:
            changed = _first_difference(stored, config_yaml)
            raise UserError(
                f"{folder}: --resume needs the configuration that the run was started with; {changed}"
            )
        recover(folder / "checkpoints")
        return
    if folder.exists() and not _is_unused(folder):
        remedy = "choose another --out, or --resume" if resumable else "choose another --out"
        raise UserError(f"{folder}: already exists and is never overwritten; {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in BEGINNINGS:
            (folder / name).unlink(missing_ok=True)
        path.write_text(config_yaml, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def _is_unused(folder: Path) -> bool:
    """Say whether a folder is empty, or holds nothing but the beginnings of a run."""
    if not folder.is_dir():
        return False
    found = list(folder.iterdir())
    if not found:
        return True
    is_run = any(path.name == "config.yaml" for path in found)
    found = [path for path in found if path.name not in REUSABLE]
    logs = [path for path in found if path.suffix == ".jsonl"]
    return is_run and {path.name for path in found} <= BEGINNINGS and all(p.stat().st_size == 0 for p in logs)


def recover(parent: Path) -> None:
    """Clear what killed writers left in a folder of committed folders.

    A folder that was set aside and whose successor never came gets its name back; half-written and
    half-removed ones are deleted.

    Args:
        parent: Folder of the committed folders; it may be missing. Nobody may be writing to it.
    """
    for path in sorted(parent.glob(".old-*")):
        final = parent / path.name.removeprefix(".old-").rpartition("-")[0]
        if not final.exists():
            path.rename(final)
    for path in [*parent.glob(".old-*"), *parent.glob(".tmp-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Delete a committed folder; killed in the middle it leaves no folder that looks whole."""
    doomed = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _first_difference(stored: str, given: str) -> str:
    pairs = zip(stored.splitlines(), given.splitlines(), strict=False)
    for number, (old, new) in enumerate(pairs, start=1):
        if old != new:
            return f"config.yaml line {number} has {old.strip()!r}, you gave {new.strip()!r}"
    return "the number of fields differs"


@contextmanager
def commit_folder(final: Path) -> Iterator[Path]:
    """Write a folder that appears under its name only when it is complete.

    Files go to a temporary sibling; on success a manifest with size and SHA-256 of each is added, everything
    is synced to disk, and the folder is renamed. After an error the temporary folder is removed and nothing
    has changed. What a killed process leaves is cleared by `recover`.

    Args:
        final: The name; an older folder of that name is replaced.

    Yields:
        The temporary folder to write into.
    """
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        files = {}
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                files[str(path.relative_to(temporary))] = {
                    "size": path.stat().st_size,
                    "sha256": _digest(path),
                }
                _sync(path)
        manifest = {"format": FORMAT_VERSION, "threads": torch.get_num_threads(), "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        _sync(temporary / MANIFEST)
        _sync(temporary)
        if final.exists():
            retired = final.with_name(f".old-{final.name}-{os.getpid()}")
            shutil.rmtree(retired, ignore_errors=True)
            final.rename(retired)
            temporary.rename(final)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            temporary.rename(final)
        _sync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_folder(folder: Path) -> None:
    """Check every file of a committed folder against its manifest.

    Raises:
        UserError: If the manifest or a file is missing, or one differs.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{folder}: no readable manifest ({type(error).__name__})") from None
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing, though the manifest names it")
        if path.stat().st_size != size or _digest(path) != digest:
            raise UserError(f"{path}: differs from its manifest (corrupt)")


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / "checkpoints" / f"step_{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Return the steps that have a committed checkpoint, ascending."""
    folders = (run / "checkpoints").glob("step_*")
    return sorted(
        int(path.name[5:])
        for path in folders
        if re.fullmatch(r"step_\d+", path.name) and (path / MANIFEST).is_file()
    )


def save_step(
    run: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Commit the checkpoint of a step and remove all but the newest ones.

    Args:
        run: Run folder.
        step: Optimizer steps done.
        write_model: Writes the model folder.
        tensors: Optimizer state.
        state: Everything else that resuming needs, as JSON values.
        keep: Checkpoints kept, at least 2.

    Returns:
        The committed folder.

    Raises:
        UserError: If the disk refuses; nothing that was there is lost.
    """
    folder = step_folder(run, step)
    try:
        with commit_folder(folder) as temporary:
            write_model(temporary)
            training = temporary / "training"
            training.mkdir()
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                training / "optimizer.safetensors",
            )
            (training / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0][:120]
        raise UserError(
            f"{folder}: the checkpoint could not be written ({reason}); earlier ones are whole: free space, then "
            "--resume"
        ) from None
    for old in saved_steps(run)[: -max(keep, 2)]:
        _remove(step_folder(run, old))
    return folder


def load_step(run: Path) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]] | None:
    """Read the newest checkpoint that verifies; corrupt newer ones are set aside, loudly.

    Args:
        run: Run folder.

    Returns:
        Model folder, optimizer tensors and state; None when the run has no checkpoint yet.

    Raises:
        UserError: If there are checkpoints, but none can be read.
    """
    steps = saved_steps(run)
    problems = []
    for step in reversed(steps):
        folder = step_folder(run, step)
        try:
            verify_folder(folder)
            tensors = load_file(folder / "training" / "optimizer.safetensors")
            state = json.loads((folder / "training" / "state.json").read_text())
        except (UserError, OSError, ValueError, SafetensorError) as error:
            problems.append(str(error))
            aside = folder.with_name(f".corrupt-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            print(f"whet: warning: {error}; set aside, trying the checkpoint before it", flush=True)
            continue
        threads = json.loads((folder / MANIFEST).read_text()).get("threads")
        if threads != torch.get_num_threads():
            now = torch.get_num_threads()
            print(
                f"whet: warning: saved with {threads} CPU threads, resumed with {now}: not bitwise the same run",
                flush=True,
            )
        return folder, tensors, state
    if problems:
        raise UserError(f"{run}: no checkpoint can be read; the newest says: {problems[0]}")
    return None
