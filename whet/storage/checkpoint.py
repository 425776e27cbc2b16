"""Checkpoints of a run: tensors and JSON only, each step complete or absent, verified before use."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from whet.kernels.cpu import build
from whet.kernels.dispatch import EAGER
from whet.kernels.mode import VARIABLE, mode
from whet.ranks.collectives import is_distributed, is_share, on_main, rank, together
from whet.ranks.fsdp import agreed, local
from whet.storage.commit import (
    MANIFEST,
    UNREADABLE,
    commit_folder,
    digest,
    machine,
    remove,
    save_tensors,
    set_aside,
    sync,
    verify_folder,
)
from whet.types import UserError

# Sharded state in safetensors files: written once, by all ranks together; any number of ranks can read it.

ALONE = "state.safetensors"


def save_sharded(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors into a folder; every rank calls it, with the same names.

    The ranks that hold the parts of a DTensor write it; one rank writes a tensor that is the same on all. With one
    process it is one plain file. Nothing is committed: see `commit_sharded`.

    Args:
        folder: An existing folder that all ranks see.
        tensors: By name.

    Raises:
        OSError: If the disk is full or fails, on every rank.
    """
    if not is_distributed():
        save_tensors({name: t.detach().contiguous() for name, t in tensors.items()}, folder / ALONE)
        return
    # Imported here: it takes a second or two.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with together(f"save_sharded of {_layout(tensors)}"):
        try:
            save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:
            raise next(cause for cause, _ in error.failures.values()) from None


def load_sharded(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors with what `save_sharded` wrote, from any number of ranks; every rank calls it.

    Args:
        folder: The folder, already verified.
        into: By name; a DTensor gets its parts.

    Raises:
        UserError: If a tensor is missing or incomplete there, or has another shape or dtype.
    """
    if not is_distributed() and [path.name for path in folder.glob("*.safetensors")] == [ALONE]:
        stored = load_file(folder / ALONE)
        _check(folder, into, {name: (t.shape, t.dtype, t.numel()) for name, t in stored.items()})
        for name, tensor in into.items():
            tensor.copy_(stored[name])
        return
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    found = {
        name: (entry.size, entry.properties.dtype, sum(math.prod(chunk.sizes) for chunk in entry.chunks))
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _check(folder, into, found)
    if is_distributed():
        with together(f"load_sharded of {_layout(into)}"):
            load(dict(into), storage_reader=reader)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(into), storage_reader=reader, no_dist=True)


def commit_sharded(
    final: Path, part: str, tensors: Mapping[str, torch.Tensor], write: Callable[[Path], None]
) -> None:
    """Commit a folder that all ranks write, atomically like `commit_folder`; every rank calls it.

    Args:
        final: The folder's name.
        part: Its subfolder for the tensors.
        tensors: For `save_sharded`.
        write: Writes everything else; called on rank 0.

    Raises:
        UserError: If the disk is full or fails, on every rank; nothing that was there is lost.
    """
    with ExitStack() as opened:

        def begin() -> str:
            folder = opened.enter_context(commit_folder(final))
            (folder / part).mkdir(parents=True)
            return str(folder)

        folder = Path(on_main(begin))
        failed: OSError | None = None
        try:
            save_sharded(folder / part, tensors)
        except OSError as error:
            failed = error

        def finish() -> None:
            with opened.pop_all():  # commits the folder, or deletes it
                if failed is not None:
                    raise failed
                write(folder)

        on_main(finish)


def _check(
    folder: Path, into: Mapping[str, torch.Tensor], found: Mapping[str, tuple[torch.Size, torch.dtype, int]]
) -> None:
    for name, tensor in into.items():
        if name not in found:
            raise UserError(f"{folder}: has no tensor {name!r}, which this model's state needs")
        shape, dtype, numbers = found[name]
        if (shape, dtype, numbers) != (tensor.shape, tensor.dtype, tensor.numel()):
            got = f"{dtype} {list(shape)} with {numbers} numbers"
            raise UserError(
                f"{folder}: tensor {name!r} has {got}, expected {tensor.dtype} {list(tensor.shape)} with "
                f"{tensor.numel()}"
            )


def _layout(tensors: Mapping[str, torch.Tensor]) -> str:
    """Describe names, shapes and dtypes."""
    text = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(tensors.items())])
    return f"{len(tensors)} tensors ({zlib.crc32(text.encode()):08x})"


ALONE, SHARDS = "optimizer.safetensors", "optimizer"
"""File of the tensors of one process; folder of those that several ranks wrote together."""
RECORDS = "replay"
"""Folder of recorded steps; each starts from the checkpoint of the step before, the first without weights."""
ORIGIN = "training/run.json"
"""File of a checkpoint: the id of the run that made it."""
LOGS = ("metrics.jsonl", "samples.jsonl", "warnings.jsonl")
Sameness = Literal["strict", "warn", "off"]
"""What to do if a resumed run cannot be bitwise the same: refuse, warn, or nothing."""


Resume = bool | int
"""How a program resumes: False not at all, True from the newest step that verifies, a number from that step."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was verified.

    Attributes:
        folder: Its folder, a model folder.
        state: Everything that is not a tensor, as JSON values, with 'step'.
    """

    folder: Path
    state: dict[str, Any]

    def names(self) -> set[str]:
        """Return the names of the tensors."""
        alone, shards = self.folder / "training" / ALONE, self.folder / "training" / SHARDS
        found: set[str] = set()
        for path in [alone] if alone.is_file() else shards.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                found |= set(file.keys())
        return found

    def read(self, like: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the saved tensors (optimizer state and the like); all ranks call it.

        Args:
            like: Tensors of the same names and shapes; sharded state is read into them.

        Raises:
            UserError: If it cannot be read, or has other tensors.
        """
        path = self.folder / "training" / ALONE
        if not path.is_file():
            load_sharded(self.folder / "training" / SHARDS, like)
            return like
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None


class LogHashes:
    """Size and SHA-256 of a run's growing logs; each call reads only what was appended since the last one.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known = {name: (0, hashlib.sha256()) for name in LOGS}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return size and hash by name of the logs that exist."""
        found: dict[str, dict[str, Any]] = {}
        for name in LOGS:
            path = self._run / name
            if path.is_file():
                size, running = self._known[name]
                if path.stat().st_size < size:  # somebody truncated it
                    size, running = 0, hashlib.sha256()
                with path.open("rb") as file:
                    file.seek(size)
                    while data := file.read(1 << 20):
                        running.update(data)
                        size += len(data)
                self._known[name] = size, running
                found[name] = {"size": size, "sha256": running.hexdigest()}
        return found


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


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first tensor with a NaN or an infinity; '' where all are finite, on all ranks."""
    found = next((name for name, t in tensors.items() if not bool(torch.isfinite(local(t)).all())), "")
    return agreed(found) if any(map(is_share, tensors.values())) else found


def save_step(
    run: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    logs: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Commit the checkpoint of a step and remove all but the newest ones; all ranks call it, and write it together.

    Args:
        run: Run folder.
        step: Optimizer steps done.
        write_model: Writes the model folder.
        tensors: Optimizer state.
        state: Everything else that resuming needs, as JSON values.
        logs: What `LogHashes.describe` returned at this step; default: the logs' state now.
        keep: Checkpoints kept, at least 2.

    Returns:
        The committed folder.

    Raises:
        UserError: If the disk refuses, or a tensor is not finite; nothing that was there is lost.
    """
    if name := not_finite(tensors):
        raise UserError(
            f"step {step}: {name} is not finite and was not saved; resume from the checkpoint before it (--resume) "
            "with a lower learning rate"
        )
    folder = step_folder(run, step)

    def write(temporary: Path) -> None:
        write_model(temporary)
        training = temporary / "training"
        training.mkdir(exist_ok=True)
        (training / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
        described = LogHashes(run).describe() if logs is None else logs
        for name in described:
            sync(run / name)
        (training / "logs.json").write_text(json.dumps(described, indent=1) + "\n")
        if own := _run_id(run / "provenance.json"):
            (temporary / ORIGIN).write_text(json.dumps({"run_id": own}) + "\n")

    if is_distributed():
        commit_sharded(folder, f"training/{SHARDS}", tensors, write)
    else:
        with commit_folder(folder) as temporary:
            write(temporary)
            parts = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_tensors(parts, temporary / "training" / ALONE)
    if rank() == 0:
        sync(run)  # the names in it: config.yaml, the logs, checkpoints/ itself
        _purge(run, keep)
    return folder


def _purge(run: Path, keep: int) -> None:
    """Remove all checkpoints but the newest ones, and what was recorded of the step after each."""
    saved = saved_steps(run)
    if not saved:  # somebody has just removed them
        return
    oldest = saved[-max(keep, 2) :][0]
    for old in _steps(run):
        if old < oldest:
            remove(step_folder(run, old))
    for record in (run / RECORDS).glob("step_*"):
        if re.fullmatch(r"step_\d{8,18}", record.name) and 1 < int(record.name[5:]) <= oldest:
            remove(record)


def _check_logs(run: Path, folder: Path) -> None:
    """Warn of logs that were damaged since the checkpoint; keep a copy, because resuming truncates them."""
    described = folder / "training" / "logs.json"
    for name, entry in json.loads(described.read_text()).items() if described.is_file() else ():
        path, copy = run / name, run / f".corrupt-{name}"
        if not path.is_file() or digest(path, entry["size"]) != entry["sha256"]:
            if path.is_file():
                shutil.copyfile(path, copy)
            text = f"{path}: damaged since {folder.name} was saved; earlier rows are wrong or lost"
            print(
                f"whet: warning: {text} (as found: {copy.name}); training itself resumes exactly", flush=True
            )


def _check_machine(folder: Path, sameness: Sameness) -> None:
    """Set the number of CPU threads of the checkpoint; refuse, or warn of, other differences that change the last bits.

    Raises:
        UserError: In strict mode, if this is not the same kind of machine.
    """
    saved, here = json.loads((folder / MANIFEST).read_text()), machine()
    threads = int(saved.get("threads") or here["threads"])
    if sameness == "strict" and threads != here["threads"]:
        torch.set_num_threads(threads)
        print(f"whet: {threads} CPU threads, as when it was saved (here it would be {here['threads']})")
        here = machine()
    if sameness == "off" or not (different := _machine_differences(saved, here)):
        return
    told, remedies = zip(*different, strict=True)
    text = f"{folder}: {'; '.join(told)}: not bitwise the same run"
    if sameness == "strict":
        advice = " and ".join(filter(None, remedies))
        raise UserError(
            f"{text}; {advice}, or continue anyway with --deterministic warn"
            if advice
            else f"{text}; continue anyway with --deterministic warn"
        )
    print(f"whet: warning: {text}", flush=True)


def _machine_differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say how a checkpoint's machine differs from this one, each time with what undoes it ('' for nothing)."""
    found: list[tuple[str, str]] = []
    for name, value in here.items():
        was = saved.get(name, value)  # earlier versions recorded less
        if name == "variables":
            found += _variable_differences(was, value)
        elif name == "kernels" and str(was).startswith(EAGER) and value != EAGER:
            found.append((f"saved with kernels {EAGER}, resumed with {value}", f"set {VARIABLE}={EAGER}"))
        elif name == "kernels" and value == EAGER and not str(was).startswith(EAGER):
            remedy = f"unset {VARIABLE}" if mode() == "eager" else ""
            found.append((f"saved with kernels {was}, resumed with {build.reason()}", remedy))
        elif was != value and not (name == "kernels" and value == EAGER):
            is_set = name == "cpu" and "ATEN_CPU_CAPABILITY" in os.environ
            remedy = "unset ATEN_CPU_CAPABILITY" if is_set else ""
            found.append((f"saved with {name} {was}, resumed with {value}", remedy))
    return found


def _variable_differences(saved: Mapping[str, str], here: Mapping[str, str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name in sorted({*saved, *here}):
        was, now = saved.get(name), here.get(name)
        if was != now:
            told = [f"{name}={value}" if value is not None else f"no {name}" for value in (was, now)]
            remedy = f"unset {name}" if was is None else f"set {name}={was}"
            found.append((f"saved with {told[0]}, resumed with {told[1]}", remedy))
    return found


def load_step(
    run: Path, resume: Resume = True, *, keep: int = 2, sameness: Sameness = "strict"
) -> Loaded | None:
    """Read the newest checkpoint that verifies (warning of corrupt newer ones and setting them aside), or one given
    step.

    Args:
        run: Run folder.
        resume: A step: read exactly that one and set later ones aside; True: read the newest.
        keep: As in `save_step`, which may have been killed before it removed older ones.
        sameness: What to do if the run cannot resume bitwise.

    Returns:
        The checkpoint; None when the run has none yet.

    Raises:
        UserError: If there are checkpoints but none can be read, or the requested one cannot.
    """
    if resume is not True:
        return _load_exactly(run, resume, sameness)
    problems = []
    for found in reversed(_steps(run)):
        folder = step_folder(run, found)
        try:
            state = _read(folder)
        except (UserError, OSError, ValueError) as error:
            problems.append(str(error))
            set_aside(folder)
            print(f"whet: warning: {error}; set aside, trying the checkpoint before it", flush=True)
            continue
        _check_run(run, folder)
        _check_machine(folder, sameness)
        _check_logs(run, folder)
        _purge(run, keep)
        return Loaded(folder, state)
    if problems:
        raise UserError(f"{run}: no checkpoint can be read; the newest says: {problems[0]}")
    if aside := sorted((run / "checkpoints").glob(".corrupt-step_*")):
        raise UserError(f"{run}: no checkpoint is left; {aside[-1]} was damaged: start a new run")
    print(f"whet: warning: {run}: it has no checkpoint; starting again at step 0", flush=True)
    return None


def _read(folder: Path) -> dict[str, Any]:
    verify_folder(folder)
    state = json.loads((folder / "training" / "state.json").read_text())
    if step_folder(folder.parent.parent, int(state["step"])) != folder:
        raise UserError(f"{folder}: holds step {state['step']}: it was renamed; give it its name back")
    return state


def _run_id(path: Path) -> str:
    """Return the id of a run in a JSON file, its own or a checkpoint's; '' where it is not known."""
    try:
        found = json.loads(path.read_bytes())["run_id"]
    except UNREADABLE:
        return ""
    return found if isinstance(found, str) else ""


def _check_run(run: Path, folder: Path) -> None:
    """Refuse a checkpoint that was made by another run: its data order, seed and counters are that run's.

    A run that was moved or copied as a whole has brought its id along.

    Raises:
        UserError: If both ids are known and differ.
    """
    own, theirs = _run_id(run / "provenance.json"), _run_id(folder / ORIGIN)
    if own and theirs and theirs != own:  # earlier versions noted none
        raise UserError(
            f"{folder}: a checkpoint of run {theirs}, while {run} is run {own}: move it away, or start a new run "
            f"from its model with --policy.init {folder}"
        )


def _load_exactly(run: Path, step: int, sameness: Sameness) -> Loaded:
    """Read one step; set later ones aside, because the run is about to rewrite their logs."""
    folder = step_folder(run, step)
    if not folder.is_dir():
        there = ", ".join(map(str, _steps(run))) or "none"
        raise UserError(f"--resume {step}: {run} has no checkpoint of that step; it has: {there}")
    try:
        state = _read(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read ({error}); leave out the step to fall back") from None
    _check_run(run, folder)
    _check_machine(folder, sameness)
    _check_logs(run, folder)
    for later in _steps(run):
        if later > step:
            kept = set_aside(step_folder(run, later), mark="later")
            print(f"whet: {step_folder(run, later).name} is later than step {step}: kept as {kept.name}")
    return Loaded(folder, state)
