"""Run folders and checkpoints: written whole or not at all, verified before use; tensors and JSON only."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
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
PARTIAL = ".config.partial"
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What JSON that anybody may have written raises when it is read."""
LOGS = ("metrics.jsonl", "samples.jsonl")
_locks: dict[Path, int] = {}
"""Run folders that this process holds, and the descriptor that holds each."""
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
        stored = path.read_text(encoding="utf-8", errors="replace")
        if stored != config_yaml:
            changed = _first_difference(stored, config_yaml)
            raise UserError(
                f"{folder}: --resume needs the configuration that the run was started with; {changed}"
            )
        _lock(folder)
        _check_config(folder, config_yaml)
        recover(folder / "checkpoints")
        for kept in (folder / "checkpoints" / "best", folder / "checkpoints" / "protocol"):
            try:
                if kept.exists():
                    verify_folder(kept)
            except UserError as error:
                _set_aside(kept)
                print(f"whet: warning: {error}; set aside", flush=True)
        return
    try:
        if not folder.exists() or _is_unused(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _lock(folder)
        if not _is_unused(folder):
            remedy = "choose another --out, or --resume" if resumable else "choose another --out"
            raise UserError(f"{folder}: already exists and is never overwritten; {remedy}")
        for name in BEGINNINGS - {"config.yaml"}:  # that goes last: without it nobody may go on
            (folder / name).unlink(missing_ok=True)
        (folder / PARTIAL).write_text(config_yaml, encoding="utf-8")
        _sync(folder / PARTIAL)
        (folder / PARTIAL).replace(path)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def _lock(folder: Path) -> None:
    """Hold a run folder until this process ends; refuse one that another process holds."""
    folder = folder.resolve()
    if folder in _locks:
        os.close(_locks.pop(folder))
    _locks[folder] = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{folder}: another process is at work in it; wait for its end, or choose another --out"
        ) from None
    except OSError:  # a file system without locks
        return


def _check_config(folder: Path, config_yaml: str) -> None:
    """Refuse a config.yaml that is not the one that the run began with, where its hash is known."""
    try:
        recorded = json.loads((folder / "provenance.json").read_bytes())["config_sha256"]
    except UNREADABLE:
        return
    if recorded and recorded != hashlib.sha256(config_yaml.encode()).hexdigest():
        raise UserError(
            f"{folder / 'config.yaml'}: changed since the run began; put it back, or start a new run"
        )


def _is_unused(folder: Path) -> bool:
    """Say whether a folder is empty, or holds nothing but the beginnings of a run."""
    found = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {"": folder}
    found.pop(PARTIAL, None)
    begun = {name: path for name, path in found.items() if name not in REUSABLE}
    logs = [path for path in begun.values() if path.suffix == ".jsonl"]
    is_beginning = "config.yaml" in found and begun.keys() <= BEGINNINGS
    return not found or (is_beginning and all(path.stat().st_size == 0 for path in logs))


def recover(parent: Path) -> None:
    """Clear what killed writers left in a folder of committed folders.

    A folder that was set aside and whose successor never came gets its name back; half-written and
    half-removed ones are deleted.

    Args:
        parent: Folder of the committed folders; it may be missing. Nobody may be writing to it.
    """
    for path in sorted(parent.glob(".old-*")):
        if not (final := parent / path.name.removeprefix(".old-").rpartition("-")[0]).exists():
            path.rename(final)
    for path in [*parent.glob(".old-*"), *parent.glob(".tmp-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _set_aside(folder: Path) -> None:
    """Rename a damaged folder, so that nothing uses it and somebody can look at it."""
    aside = folder.with_name(f".corrupt-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


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

    Raises:
        UserError: If the disk refuses; nothing that was there is lost.
    """
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        files = {}
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                entry = {"size": path.stat().st_size, "sha256": _digest(path)}
                files[str(path.relative_to(temporary))] = entry
                _sync(path)
        manifest = {"format": FORMAT_VERSION, "threads": torch.get_num_threads(), "files": files}
        manifest["sha256"] = _seal(manifest)
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
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0][:120]
        text = f"{final}: the checkpoint could not be written ({reason}); earlier ones are whole"
        raise UserError(f"{text}: free space, then --resume") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _digest(path: Path, size: int = sys.maxsize) -> str:
    """Return the sha256 of a file's first `size` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, 1 << 20))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's own content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_folder(folder: Path) -> None:
    """Check every file of a committed folder against its manifest.

    Raises:
        UserError: If the manifest or a file is missing, one differs, or there is one that the manifest does not name.
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
    return [step for step in _steps(run) if (step_folder(run, step) / MANIFEST).is_file()]


def _steps(run: Path) -> list[int]:
    """Return the steps that have a folder, damaged ones too, ascending."""
    folders = (run / "checkpoints").glob("step_*")
    return sorted(int(path.name[5:]) for path in folders if re.fullmatch(r"step_\d{8,18}", path.name))


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
    with commit_folder(folder) as temporary:
        write_model(temporary)
        training = temporary / "training"
        training.mkdir()
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            training / "optimizer.safetensors",
        )
        (training / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
        (training / "logs.json").write_text(json.dumps(_describe_logs(run), indent=1) + "\n")
    _purge(run, keep)
    return folder


def _purge(run: Path, keep: int) -> None:
    """Remove all checkpoints but the newest ones."""
    oldest = saved_steps(run)[-max(keep, 2) :][0]
    for old in _steps(run):
        if old < oldest:
            _remove(step_folder(run, old))


def _describe_logs(run: Path) -> dict[str, dict[str, Any]]:
    """Bring the logs to disk; return size and hash of each, by which a resumed run finds them changed."""
    found = [run / name for name in LOGS if (run / name).is_file()]
    for path in found:
        _sync(path)
    return {path.name: {"size": path.stat().st_size, "sha256": _digest(path)} for path in found}


def _check_logs(run: Path, folder: Path) -> None:
    """Tell of logs whose beginning is not what it was when a checkpoint was made; keep a copy, as it is cut next."""
    described = folder / "training" / "logs.json"
    for name, entry in json.loads(described.read_text()).items() if described.is_file() else ():
        path, copy = run / name, run / f".corrupt-{name}"
        if not path.is_file() or _digest(path, entry["size"]) != entry["sha256"]:
            if path.is_file():
                shutil.copyfile(path, copy)
            text = f"{path}: damaged since {folder.name} was saved; earlier rows are wrong or lost"
            print(f"whet: warning: {text} (as found: {copy.name}); training goes on exactly", flush=True)


def load_step(run: Path, *, keep: int = 2) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]] | None:
    """Read the newest checkpoint that verifies; corrupt newer ones are set aside, loudly.

    Args:
        run: Run folder.
        keep: As in `save_step`, which may have been killed before it removed older ones.

    Returns:
        Model folder, optimizer tensors and state; None when the run has no checkpoint yet.

    Raises:
        UserError: If there are checkpoints, but none can be read.
    """
    problems = []
    for step in reversed(_steps(run)):
        folder = step_folder(run, step)
        try:
            verify_folder(folder)
            tensors = load_file(folder / "training" / "optimizer.safetensors")
            state = json.loads((folder / "training" / "state.json").read_text())
        except (UserError, OSError, ValueError, SafetensorError) as error:
            problems.append(str(error))
            _set_aside(folder)
            print(f"whet: warning: {error}; set aside, trying the checkpoint before it", flush=True)
            continue
        threads, now = json.loads((folder / MANIFEST).read_text()).get("threads"), torch.get_num_threads()
        if threads != now:
            print(
                f"whet: warning: saved with {threads} CPU threads, resumed with {now}: not bitwise the same run",
                flush=True,
            )
        _check_logs(run, folder)
        _purge(run, keep)
        return folder, tensors, state
    if problems:
        raise UserError(f"{run}: no checkpoint can be read; the newest says: {problems[0]}")
    if set_aside := sorted((run / "checkpoints").glob(".corrupt-step_*")):
        raise UserError(f"{run}: no checkpoint is left; {set_aside[-1]} was damaged: start a new run")
    print(
        f"whet: warning: {run}: no checkpoint was made before it ended; it begins again at step 0", flush=True
    )
    return None
