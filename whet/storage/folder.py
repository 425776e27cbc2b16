"""Run folders: created once, locked by one process, resumed only with the configuration that started them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from whet.config import user_path
from whet.install import NoPosix, as_typed, install_command
from whet.storage.commit import UNREADABLE, recover, set_aside, sync, verify_folder
from whet.types import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = NoPosix()  # pyright: ignore[reportAssignmentType]

PARTIAL = ".config.partial"
FREE = ("out", "safety", "track", "parallel", "cluster")
"""Fields and groups of a configuration that may change on resume: no computed number depends on them.

`out` is among them, so that a run folder may be moved or copied: the folder that is named is the run.
"""
LENGTHS = ("num_steps", "rounds")
"""Fields that say how long a run is: a finished one may go on (`whet.train.session.settle` says what that means)."""
_locks: dict[Path, int] = {}
"""Run folders that this process has locked, and the file descriptor of each lock."""
# Files of a run that ended before its first result; the next run may replace them.
BEGINNINGS = frozenset(
    {
        *("config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "warnings.jsonl"),
        *("provenance.json", "heartbeats"),
    }
)
# Files that stay valid for the next run in the folder: judge scores that were paid for.
REUSABLE = frozenset({"judge.jsonl", "quarantine.jsonl"})


def open_run(folder: Path, config_yaml: str, *, resume: bool = False, resumable: bool = True) -> None:
    """Create a run folder with its config.yaml, or check that an old one may be resumed.

    A folder in which an earlier run ended before it had a result counts as new.

    Args:
        folder: The run folder.
        config_yaml: The resolved configuration.
        resume: Whether the run resumes from its newest checkpoint.
        resumable: Whether the program knows --resume, for the message.

    Raises:
        UserError: If the folder exists without `resume`, is missing with it, or holds another configuration.
    """
    path = folder / "config.yaml"
    if resume:
        refuse_folder(folder, resume=True)
        stored = path.read_text(encoding="utf-8", errors="replace")
        if changed := _first_difference(_essential(stored), _essential(config_yaml)):
            other = f"; with other settings, begin another from its weights: --model {folder} --out FOLDER"
            raise UserError(
                f"{folder}: --resume needs the configuration that the run was started with; {changed}"
                f"{other if (folder / 'checkpoints').is_dir() else ''}"
            )
        _lock(folder)
        _check_config(folder, stored)
        for part in ("checkpoints", "replay", "faults"):
            recover(folder / part)
        kept_folders = [folder / "checkpoints" / name for name in ("best", "protocol")]
        for kept in (*kept_folders, *folder.glob("replay/step_*"), *folder.glob("faults/step_*")):
            try:
                if kept.exists():
                    verify_folder(kept)
            except UserError as error:
                set_aside(kept)
                print(f"whet: warning: {error}; set aside", flush=True)
        return
    try:
        if not folder.exists() or _is_unused(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _lock(folder)
        refuse_folder(folder, resume=False, resumable=resumable)  # of another process, meanwhile
        for name in BEGINNINGS - {"config.yaml"}:  # removed last: without it nothing can resume
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
            (folder / name).unlink(missing_ok=True)
        _write_config(folder, config_yaml)
        sync(folder.absolute().parent)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def refuse_folder(folder: Path, *, resume: bool, resumable: bool = True) -> None:
    """Refuse a folder that holds a run already, or none to resume; creates nothing.

    Args:
        folder: The run folder.
        resume: Whether a run is resumed.
        resumable: Whether the program knows --resume, for the message.

    Raises:
        UserError: With what to do instead.
    """
    if resume and not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder}: nothing to resume (no config.yaml); leave out --resume to start a new run"
        )
    if not resume and folder.exists() and not _is_unused(folder):
        remedy = "choose another --out, or --resume" if resumable else "choose another --out"
        raise UserError(f"{folder}: already exists and is never overwritten; {remedy}")


def lengthen(folder: Path, config_yaml: str) -> None:
    """Write into a run's config.yaml how long it is from now on; called when nothing can refuse the resume any more."""
    stored = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    given = dict(_LENGTH.findall(config_yaml))
    longer = _LENGTH.sub(lambda found: f"{found[1]}: {given.get(found[1], found[2])}", stored)
    if longer != stored:
        _write_config(folder, longer)


def _write_config(folder: Path, text: str) -> None:
    (folder / PARTIAL).write_text(text, encoding="utf-8")
    sync(folder / PARTIAL)
    (folder / PARTIAL).replace(folder / "config.yaml")
    sync(folder)


def run_of(place: str) -> Path:
    """Return the folder of the run that a place is, or is a checkpoint of."""
    folder = user_path(place)
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def dated(kind: str) -> str:
    """Return a run folder's name of now, runs/KIND-DATE-TIME; two of one second get a number."""
    name = time.strftime(f"runs/{kind}-%Y%m%d-%H%M%S")
    names = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    return next(name for name in names if not Path(name).exists())


def beside(out: str, kind: str) -> str:
    """Return the name of a new folder next to another, OUT-KIND; where that is taken, with a number."""
    name = f"{out.rstrip(os.sep)}-{kind}"
    names = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    return next(name for name in names if not user_path(name).exists())


NEXT_INDENT = "\n      "


def next_line(*commands: str | Sequence[str]) -> str:
    """Return what one does next: whole commands, given as words, one a line, as they can be pasted; '' is left out."""
    texts = [text if isinstance(text, str) else shlex.join(text) for text in commands]
    # As a comment, so that the line can be pasted once that is done.
    lacks = "" if find_spec("uvicorn") else f"   # first: {install_command('web')}"
    typed = (
        f"{as_typed()}{text[4:]}{lacks if text.startswith('whet serve ') else ''}"
        if text.startswith("whet ")
        else text
        for text in texts
    )
    return f"next: {NEXT_INDENT.join(filter(None, typed))}"


def check_folder(folder: Path, *, resumable: bool = True) -> None:
    """Find what `open_run` would refuse in a new run's folder; creates nothing.

    Raises:
        UserError: If the folder holds a run, or cannot be made.
    """
    refuse_folder(folder, resume=False, resumable=resumable)
    nearest = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    try:  # root may write anywhere, and cannot in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".whet-", dir=nearest))
    except OSError:
        raise UserError(
            f"{folder}: cannot be written ({nearest} is no folder that you may write to)"
        ) from None


def _lock(folder: Path) -> None:
    """Lock a run folder until this process ends; refuse one that another process has locked."""
    folder = folder.resolve()
    descriptor = os.open(folder, os.O_RDONLY)
    # A lock of this process gives way: of the same path, or of a path that the folder has had before.
    for path, earlier in list(_locks.items()):
        if path == folder or os.path.sameopenfile(earlier, descriptor):
            os.close(_locks.pop(path))
    _locks[folder] = descriptor
    try:
        fcntl.flock(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{folder}: another process is using it; wait until that ends, or choose another --out"
        ) from None
    except OSError:  # a file system without locks
        return


def displaced(folder: Path, files: Sequence[str] = ()) -> str:
    """Say what became of a run folder that this process has locked: 'moved to ...', 'removed' or 'emptied'; '' while it
    is there.

    Its open files would be written on, elsewhere or nowhere, and its checkpoints would make a new folder.

    Args:
        folder: The folder.
        files: Files that are in it unless somebody removed them.
    """
    descriptor = _locks.get(folder.resolve())
    if descriptor is None:
        return ""
    locked = os.fstat(descriptor)
    try:
        found = folder.stat()
    except OSError:
        found = None
    is_there = locked.st_nlink > 0  # a folder made in a removed one's place may get its number
    if is_there and found is not None and (found.st_dev, found.st_ino) == (locked.st_dev, locked.st_ino):
        return "" if all((folder / name).is_file() for name in files) else "emptied"
    try:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # no /proc
        return "moved or removed"
    return "removed" if place.endswith(" (deleted)") else f"moved to {place}"


def _check_config(folder: Path, config_yaml: str) -> None:
    """Refuse a config.yaml that was edited since the run started, but in what may differ, if its hash is known."""
    try:
        recorded = json.loads((folder / "provenance.json").read_bytes())
        whole, essential = recorded["config_sha256"], recorded.get("essential_sha256")
    except UNREADABLE:
        return
    is_whole = not whole or whole == hashlib.sha256(config_yaml.encode()).hexdigest()
    if not is_whole and essential != essential_hash(config_yaml):  # earlier versions recorded the whole alone
        raise UserError(
            f"{folder / 'config.yaml'}: changed since the run started; restore it, or start a new run"
        )


def _is_unused(folder: Path) -> bool:
    """Say whether a folder is empty, or holds only files of a run without results."""
    found = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {"": folder}
    found.pop(PARTIAL, None)
    begun = {name: path for name, path in found.items() if name not in REUSABLE}
    logs = [path for name, path in begun.items() if path.suffix == ".jsonl" and name != "warnings.jsonl"]
    is_beginning = "config.yaml" in found and begun.keys() <= BEGINNINGS
    return not found or (is_beginning and all(path.stat().st_size == 0 for path in logs))


_LENGTH = re.compile(rf"^({'|'.join(LENGTHS)}): (\d+)$", re.MULTILINE)


def _essential(config_yaml: str) -> list[tuple[int, str]]:
    """Return the lines of a configuration that decide what the run computes, with their numbers."""
    key, lines = "", []
    for number, line in enumerate(config_yaml.splitlines(), start=1):
        if line[:1].strip():
            key = line.partition(":")[0]
        if key not in (*FREE, *LENGTHS):
            lines.append((number, line))
    return lines


def essential_hash(config_yaml: str) -> str:
    """Return the sha256 of the lines of a configuration that decide what the run computes."""
    lines = "\n".join(line for _, line in _essential(config_yaml))
    return hashlib.sha256(lines.encode()).hexdigest()


def _first_difference(stored: list[tuple[int, str]], given: list[tuple[int, str]]) -> str:
    """Say where two configurations differ first; '' when they agree."""
    for (number, old), (_, new) in zip(stored, given, strict=False):
        if old != new:
            return f"config.yaml line {number} has {old.strip()!r}, you gave {new.strip()!r}"
    return "" if len(stored) == len(given) else "the number of fields differs"
