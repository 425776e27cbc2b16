"""How to install what is missing, for how whet itself was installed; imports no other package."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from whet.types import UserError

DISTRIBUTION = "whet-rl"
"""Name of the package in an index; `whet` belongs to another project there, and the import stays `whet`."""
CORE = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "tyro",
    "rich",
    "yaml",
    "matplotlib",
    "psutil",
)
"""Modules without which whet does not run, as pyproject.toml names their packages (yaml: pyyaml)."""


def install_command(extra: str = "") -> str:
    """Return the command that installs an extra of whet, or without one what whet itself needs.

    Args:
        extra: A name of `[project.optional-dependencies]`.
    """
    pip = pip_command()
    suffix = f"[{extra}]" if extra else ""
    source = _source()
    url, place = str(source.get("url", "")), urlsplit(str(source.get("url", "")))
    folder = unquote(place.path)
    if "dir_info" in source and place.scheme == "file":
        if not source["dir_info"].get("editable"):
            return f"{pip} install {_quoted(folder + suffix)}"
        pins = Path(folder) / "constraints.txt"
        pinned = f" -c {shlex.quote(str(pins))}" if pins.is_file() else ""
        return f"{pip} install -e {_quoted(folder + suffix)}{pinned}"
    if "vcs_info" in source:
        found = source["vcs_info"]
        return f"{pip} install '{DISTRIBUTION}{suffix} @ {found['vcs']}+{url}@{found['commit_id']}'"
    if "archive_info" in source:
        return f"{pip} install '{DISTRIBUTION}{suffix} @ {url}'"
    return f"{pip} install '{DISTRIBUTION}{suffix}'"


SYSTEMS = "whet runs on Linux and macOS; on Windows use WSL2"


def wrong_system() -> str:
    """Return the line about a system that whet does not run on; '' on any other."""
    try:
        import fcntl  # noqa: F401
        import resource  # noqa: F401
        import termios  # noqa: F401
    except ImportError:
        return SYSTEMS
    return ""


class NoPosix:
    """Stands for a POSIX module where there is none: importing a module of whet does not fail, its use says why."""

    def __getattr__(self, name: str) -> Any:
        raise UserError(SYSTEMS)


def missing_core(error: ModuleNotFoundError) -> str:
    """Return the line about a package of whet's own that is not installed; '' for any other module."""
    name = (error.name or "").partition(".")[0]
    if name not in CORE:
        return ""
    return f"{name} is not installed, and whet needs it: {install_command()}"


def _source() -> dict[str, Any]:
    """Return where whet was installed from (PEP 610): {} from an index; a checkout that runs in place is editable."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        folder = Path(__file__).resolve().parents[1]
        return {"url": folder.as_uri(), "dir_info": {"editable": True}}
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def pip_command() -> str:
    """Return this Python's pip as one types it."""
    return "pip" if _is_found("pip") else f"{shlex.quote(sys.executable)} -m pip"


def as_typed(*words: str) -> str:
    """Return a command of whet as one types it: `whet` is its path where the shell does not find this one.

    Args:
        words: The words after `whet`.
    """
    own = Path(sys.executable).with_name("whet")
    if _is_found("whet"):
        start = "whet"
    elif own.is_file():
        here = Path.cwd()
        is_below = own.is_relative_to(here) and own.parent != here  # alone, it would be searched in PATH
        start = shlex.quote(str(own.relative_to(here) if is_below else own))
    else:
        start = f"{shlex.quote(sys.executable)} -m whet"
    return " ".join([start, *map(shlex.quote, words)])


def _is_found(program: str) -> bool:
    """Say whether the shell finds this Python's program by its name."""
    found = shutil.which(program)
    return found is not None and Path(found).parent == Path(sys.executable).parent


def _quoted(text: str) -> str:
    """Return a shell word that is always in quotes: the brackets of an extra are a pattern to some shells."""
    return shlex.quote(text) if "'" in text else f"'{text}'"
