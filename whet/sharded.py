"""State of several ranks in safetensors files: written once, by all ranks together, and read by any number of them."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from whet.commit import commit_folder
from whet.distributed import is_distributed, on_main, together
from whet.types import UserError

ALONE = "state.safetensors"


def save_sharded(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors into a folder; every rank calls it, with the same names.

    A DTensor is written by the ranks that hold its parts, a tensor that is the same on all ranks by one of them. Alone,
    it is one plain file. Nothing is committed: see `commit_sharded`.

    Args:
        folder: An existing folder that all ranks see.
        tensors: By name.

    Raises:
        OSError: If the disk refuses, on every rank.
    """
    if not is_distributed():
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, folder / ALONE)
        return
    # Here, as it takes a second or two.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with together(f"save_sharded of {_layout(tensors)}"):
        try:
            save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:
            raise next(cause for cause, _ in error.failures.values()) from None


def load_sharded(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors with what `save_sharded` wrote, on whatever number of ranks; every rank calls it.

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
    """Commit a folder that all ranks write: whole or not at all, as `commit_folder`; every rank calls it.

    Args:
        final: The folder's name.
        part: The folder in it that the tensors go to.
        tensors: For `save_sharded`.
        write: Writes everything else; called on rank 0.

    Raises:
        UserError: If the disk refuses, on every rank; nothing that was there is lost.
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
            with opened.pop_all():  # commits the folder, or clears it away
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
