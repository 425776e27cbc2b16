"""Files of a model folder, local or on the Hugging Face hub, read within bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.types import UserError

MAX_FILE_BYTES = 64 * 2**20


def read_text(path: Path) -> str:
    """Read a UTF-8 file of bounded size; raise UserError otherwise."""
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
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def find_files(source: str | Path, names: Sequence[str]) -> dict[str, Path]:
    """Locate those of the named files that exist, in a local folder or on the hub.

    Args:
        source: Folder, or hub name such as 'owner/name'.
        names: Plain file names; the first one must exist.

    Returns:
        Local path by name.

    Raises:
        UserError: If the folder, the first file or the hub is not there.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        files = {name: folder / name for name in names if (folder / name).is_file()}
        if names[0] not in files:
            raise UserError(f"{folder}: no {names[0]} there; point at a folder in the Hugging Face layout")
        return files
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", str(source)):
        raise UserError(f"{str(source)!r}: no such folder, and not a hub name such as 'owner/name'")
    return _hub_files(str(source), names)


def _hub_files(source: str, names: Sequence[str]) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    files: dict[str, Path] = {}
    for name in names:
        try:
            files[name] = Path(hf_hub_download(source, name, etag_timeout=10))
        except Exception as error:  # network errors of many libraries
            is_absent = isinstance(error, EntryNotFoundError) and not isinstance(
                error, LocalEntryNotFoundError
            )
            if is_absent and name != names[0]:
                continue
            text = (str(error).splitlines() or [type(error).__name__])[0][:160]
            reason = f"has no {name} on the hub" if is_absent else f"cannot be had from the hub ({text})"
            raise UserError(
                f"{source!r}: no such folder, and {reason}; check the name, or download it to a folder"
            ) from error
    return files
