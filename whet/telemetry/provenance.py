"""Provenance of a run: run id, base model, adapter, config, data, code and tracker runs, in one file per run.

Its hashes tie a result to everything that it depends on, so that "which weights were these" has an answer years later.
Folders of earlier versions have none: their id is derived from config and start time.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from whet import __version__, processes
from whet.config import SHORT_MODELS, to_dict, user_path
from whet.storage.folder import essential_hash
from whet.telemetry.hardware import cpu_name
from whet.types import Problem, UserError

# Facts about machine and software that results depend on, stored with the run.

PUSHES = "pushes.json"
"""File of a run's folder: the commits on the hub that it became."""
ENVIRONMENT_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCHELASTIC_RUN_ID")
"""The only variables that are recorded: others may contain secrets."""


def write_environment(run_dir: Path) -> dict[str, Any]:
    """Write environment.json into a run folder, at every start of a run.

    Args:
        run_dir: Run folder, created if missing.

    Returns:
        The content written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    facts = describe_environment()
    (run_dir / "environment.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="ascii")
    return facts


def describe_environment() -> dict[str, Any]:
    """Collect versions, processor, devices, threads, command line and time; None where a fact is missing."""
    import numpy
    import torch

    from whet.kernels import dispatch

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "whet": __version__,
        "git_commit": _git_commit(Path(__file__).resolve().parents[2]),
        "folder": os.getcwd(),  # relative paths of the config start here
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "kernels": _kernels(cuda),
        "kernels_used": dispatch.record(),
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
        "cuda_device": cuda,
        "gpu_architecture": _gpu_architecture(),
        "num_cuda_devices": torch.cuda.device_count(),
        "gpu_runtime": _gpu_runtime(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT_VARIABLES},
        "argv": sys.argv,
        "start_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _gpu_runtime() -> str | None:
    """Return what PyTorch was built to run GPUs with, ROCm or CUDA, and its version; AMD's GPUs are named cuda, too."""
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _gpu_architecture() -> str | None:
    """Return what the first GPU's programs are compiled for: gfx942 for an MI300X, sm_90 for an H100."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]  # features of the chip follow
    return f"sm_{properties.major}{properties.minor}"


def _kernels(cuda: str | None) -> str:
    """Return the kernels in use: on the GPU if there is one and no CPU model was loaded."""
    from whet.kernels import dispatch
    from whet.kernels.mode import mode

    if cuda is not None and dispatch.current() is None:
        if dispatch.uses_triton():
            return f"Triton and CUDA graphs on {cuda}"
        why = f" ({dispatch.triton_refusal()})" if mode() == "auto" else ""
        return f"PyTorch on {cuda}{why}"
    return dispatch.describe()


@cache
def _git_commit(root: Path) -> str | None:
    """Return the commit of the checkout that this package runs from, '-dirty' if tracked files differ.

    Asked for once: whatever is edited or checked out later is not what this process has loaded.
    """
    if not (root / ".git").exists():  # an installed package may be inside somebody else's repository
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return processes.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()


@cache
def _own_code() -> str:
    """Return a short hash of this package's Python files (the C++ kernels have their own in a checkpoint)."""
    own, root = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        own.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return own.hexdigest()[:12]


PROVENANCE = "provenance.json"
MARKS = frozenset({PROVENANCE, "eval.json", "summary.json"})
"""Files that make a folder a run; config.yaml with environment.json does, too."""
SKIPPED = frozenset({"checkpoints", "plots", "__pycache__", "node_modules"})
WEIGHTS = ("*.safetensors", "config.json", "adapter_config.json")


def write_provenance(
    folder: Path,
    *,
    base: str = "",
    adapter: str = "",
    config_yaml: str = "",
    problems: Iterable[Problem] = (),
    links: Sequence[Mapping[str, Any]] = (),
    inputs: Mapping[str, str] | None = None,
    may_differ: bool = False,
) -> dict[str, Any]:
    """Write provenance.json into a run folder; a resumed run keeps its first one, unless it is damaged.

    Where it is gone or damaged, inputs are compared with those that the newest checkpoint has.

    Args:
        folder: The run folder, with its environment.json.
        base: The model that the run starts from: folder, run folder or hub name; '' for random weights.
        adapter: The adapter on it, given in the same way; '' for none.
        config_yaml: The resolved configuration.
        problems: The data: uid, prompt and answer of every problem are hashed, in any order.
        links: Runs of trackers: {"name", "id", "url"}.
        inputs: Hashes of everything that is read (`inputs_of`), which a resumed run has to find again; None: unknown.
        may_differ: Whether a resumed run with other inputs goes on: with a warning, and a note in the file.

    Returns:
        The content.

    Raises:
        UserError: If a resumed run has other inputs and may not.
    """
    path, (saved, saved_id) = folder / PROVENANCE, _saved_origin(folder)
    if path.is_file() and _is_whole(known := read_json(path)):
        if changed := _changed_inputs(known.get("inputs"), inputs):
            known = _with_changed(known, inputs or {}, changed, folder, may_differ=may_differ)
            _write_sealed(path, known)
        return known
    changed = _changed_inputs(saved, inputs)
    environment = read_json(folder / "environment.json")
    start = environment.get("start_utc") or datetime.now(UTC).isoformat(timespec="seconds")
    salt = f"{config_yaml}\x00{folder.resolve()}\x00{time.time_ns()}\x00{os.getpid()}"
    digest, num_problems = data_hash(problems)
    parent = parent_run(adapter or base)
    content: dict[str, Any] = {
        "run_id": saved_id or make_run_id(folder, start, salt),
        "start_utc": start,
        "base": describe_model(base) if base else None,
        "adapter": describe_model(adapter) if adapter else None,
        "config_sha256": hashlib.sha256(config_yaml.encode()).hexdigest() if config_yaml else None,
        "essential_sha256": essential_hash(config_yaml) if config_yaml else None,
        "data_sha256": digest,
        "num_problems": num_problems,
        "git_commit": environment.get("git_commit"),
        "links": [dict(link) for link in links],
        "parent": None if parent is None else {"folder": str(parent), "run_id": run_id(parent)},
        "inputs": None if inputs is None else dict(inputs),
    }
    if changed:
        content = _with_changed(
            content | {"inputs": saved}, inputs or {}, changed, folder, may_differ=may_differ
        )
    renamed = "" if saved_id else ": the run has a new id from now on"
    if path.is_file():
        aside = path.replace(folder / f".corrupt-{PROVENANCE}")
        text = f"damaged; kept as {aside.name}, and rewritten{renamed}"
        print(f"whet: warning: {path}: {text}", flush=True)
    elif saved:
        print(f"whet: warning: {path}: gone, and written again{renamed}", flush=True)
    return _write_sealed(path, content)


def _write_sealed(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write a provenance with its seal, at once or not at all; return it."""
    content = {name: value for name, value in content.items() if name != "seal"}
    content["seal"] = _seal(content)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return content


SPEC = re.compile(r"(?P<file>.+\.py):[^/]+|(?P<module>[A-Za-z_][\w.]*):[A-Za-z_][^/]*")
"""A function of one's own as a setting: file.py:name, file.py:name=0.5, package.module:name."""
SPELLING = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files of a model's folder that decide how text becomes tokens, and what its config says."""
NOT_INPUTS = frozenset({"out", "safety", "track", "parallel", "cluster"})
"""Settings that name nothing that is computed with."""


def inputs_of(
    config: Any,
    problems: Iterable[Problem],
    *,
    held_out: Sequence[Problem] = (),
    tools: Sequence[str] = (),
) -> dict[str, str]:
    """Hash what a run reads besides its configuration: a resumed run that read something else would be another run.

    These are the problems in their order, every file that a setting names (rows, templates, rubrics, Python files of
    rewards, tasks and tools, with those beside them that they import), the weights and the tokenizer of every model
    that a setting names, and whet itself. Installed packages, and what images outside of the rows show, are not looked
    at. Files are named as the setting names them, so that a project may be moved as a whole.

    Args:
        config: The run's settings, a dataclass.
        problems: What is trained on.
        held_out: What it is validated on: that decides which checkpoint is the best.
        tools: The tools in force: a model may bring its own.

    Returns:
        Hashes by a name that a user understands: 'problems', 'validation problems', 'whet', or 'setting: file'.
    """
    found = {"problems": _digest_of(problems), "whet": f"{__version__} {_own_code()}"}
    if held_out:
        found["validation problems"] = _digest_of(held_out)
    for name, value in [*_settings(to_dict(config)), *(("tools", tool) for tool in tools)]:
        for label, path in _files_of(value):
            found[f"{name}: {label}"] = _digest(path)
    return found


def _digest_of(problems: Iterable[Problem]) -> str:
    """Return number and hash of problems in their order."""
    rows, count = hashlib.sha256(), 0
    for problem in problems:
        meta = {name: text for name, text in problem.meta.items() if name != "file"}
        asked = [asdict(message) for message in problem.messages]
        texts = [
            problem.uid,
            problem.prompt,
            *problem.answers,
            problem.solution,
            problem.reply,
            *problem.images,
        ]
        rows.update(json.dumps([texts, asked, meta]).encode() + b"\n")
        count += 1
    return f"{count:,} {rows.hexdigest()}"


def _settings(values: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a configuration, as dicts and lists, with the names of their settings."""
    if isinstance(values, str):
        yield above, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            if above or key not in NOT_INPUTS:
                yield from _settings(value, f"{above}.{key}".lstrip("."))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _settings(value, above)


def _files_of(value: str) -> Iterator[tuple[str, Path]]:
    """Yield the files that a setting's text stands for, with their names: a file, a function's file, or those of a
    model's or a tokenizer's folder."""
    if not value or "\n" in value or max(map(len, value.split("/"))) > 250:  # a prompt, not a path
        return
    spec = SPEC.fullmatch(value)
    text = (spec["file"] or f"{spec['module'].replace('.', '/')}.py") if spec else value
    path = user_path(text)
    if path.is_file():
        yield text, path
        above = user_path(".") if spec and spec["module"] else path.parent
        for module in _imported_from(path, above) if path.suffix == ".py" else ():
            yield os.path.normpath(Path(text).parent / os.path.relpath(module, path.parent)), module
        return
    folder, own = _weights_folder(value), path.absolute()
    if folder is None and any(own.glob("tokenizer*")):
        folder = own
    if folder is not None:
        above = own if folder.is_relative_to(own) else folder  # else the hub's cache
        for inner in sorted(folder.iterdir()):
            if inner.is_file() and (inner.suffix in SPELLING or any(inner.match(name) for name in WEIGHTS)):
                yield f"{value.rstrip('/')}/{inner.relative_to(above)}", inner


def _imported_from(file: Path, root: Path) -> Iterator[Path]:
    """Yield the files below `root` that a Python file imports, and those that these import; packages' own, too."""
    waiting, seen = [file], {file}
    while waiting:
        path = waiting.pop()
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):  # said where the file is imported
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                start = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else root
                names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
            elif isinstance(node, ast.Import):
                start, names = root, [alias.name for alias in node.names]
            else:
                continue
            for parts in (name.split(".") for name in names):
                stems = [start.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
                for found in [
                    place for stem in stems for place in (stem.with_suffix(".py"), stem / "__init__.py")
                ]:
                    if found not in seen and found.is_file():
                        seen.add(found)
                        waiting.append(found)
                        yield found


def known_inputs(folder: Path) -> dict[str, str]:
    """Return the hashes of what a run read when it was started; {} where they are not known."""
    return read_json(folder / PROVENANCE).get("inputs") or {}


def _saved_origin(folder: Path) -> tuple[dict[str, str], str]:
    """Return the same as the newest checkpoint has it, and the id of its run; {} and '' where it has none."""
    states = sorted(folder.glob("checkpoints/step_*/training/state.json"), reverse=True)
    for state in states:
        if inputs := read_json(state).get("inputs"):
            return inputs, str(read_json(state.with_name("run.json")).get("run_id") or "")
    return {}, ""


def _changed_inputs(
    before: Mapping[str, str] | None, now: Mapping[str, str] | None
) -> dict[str, tuple[str | None, str | None]]:
    """Return what was read before and what is read now where they differ; nothing where one of them is unknown."""
    if not before or not now:
        return {}
    names = [*before, *(name for name in now if name not in before)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def _with_changed(
    known: Mapping[str, Any],
    inputs: Mapping[str, str],
    changed: Mapping[str, tuple[str | None, str | None]],
    folder: Path,
    *,
    may_differ: bool,
) -> dict[str, Any]:
    """Return a provenance that tells of changed inputs.

    Raises:
        UserError: If they may not change.
    """
    told = [_told(name, *values) for name, values in changed.items()]
    some = "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")
    text = f"{folder}: what the run reads has changed since it was started: {some}"
    if not may_differ:
        raise UserError(f"{text}; restore it, or continue as another run with --deterministic warn")
    print(f"whet: warning: {text}", flush=True)
    note = {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "changed": {name: list(values) for name, values in changed.items()},
    }
    return {**known, "inputs": dict(inputs), "input_changes": [*known.get("input_changes", ()), note]}


def _told(name: str, before: str | None, now: str | None) -> str:
    """Say in a few words how an input has changed."""
    if before is None or now is None:
        return f"{name} is {'new' if before is None else 'gone'}"
    if name in ("problems", "validation problems"):
        then, count = before.partition(" ")[0], now.partition(" ")[0]
        return f"{name} ({then}, now {count if count != then else 'with other texts or in another order'})"
    return f"{name} ({before}, now {now})" if name == "whet" else name


def _is_whole(content: Mapping[str, Any]) -> bool:
    """Say whether a provenance is unchanged since it was written; earlier versions have no seal."""
    unsealed = {name: value for name, value in content.items() if name != "seal"}
    return bool(unsealed.get("run_id")) and content.get("seal") in (None, _seal(unsealed))


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe_model(source: str) -> dict[str, Any]:
    """Identify a model's exact weights: sha256 of its files if they are local, hub commit if known.

    The manifest of a whet checkpoint has the hashes of its files, and the hub's cache names files by their hashes; only
    other files are read.

    Args:
        source: Folder, run folder or hub name.

    Returns:
        'name', 'folder' (None if not local), 'commit', 'sha256' of each file, and 'sha256_of_all' over them.
    """
    folder = _weights_folder(source)
    if folder is None:
        return {"name": source, "folder": None, "commit": None, "sha256": {}, "sha256_of_all": None}
    # Do not resolve links further: a file in the hub's cache is a link to a blob, in the folder of its commit.
    commit = re.search(r"/snapshots/([0-9a-f]{40})(?=/|$)", str(folder))
    manifest = read_json(folder / "manifest.json").get("files", {})
    hashes: dict[str, str] = {}
    for path in sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}):
        known = manifest.get(path.name, {}).get("sha256")
        blob = path.resolve().name
        hashes[path.name] = known or (blob if re.fullmatch(r"[0-9a-f]{64}", blob) else _digest(path))
    whole = hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()
    return {
        "name": source,
        "folder": str(folder),
        "commit": commit[1] if commit else None,
        "sha256": hashes,
        "sha256_of_all": whole if hashes else None,
    }


def data_hash(problems: Iterable[Problem]) -> tuple[str | None, int]:
    """Return an order-independent sha256 over uid, prompt and answer of problems, and their number."""
    rows = sorted(json.dumps([p.uid, p.prompt, *p.answers]) for p in problems)
    if not rows:
        return None, 0
    return hashlib.sha256("\n".join(rows).encode()).hexdigest(), len(rows)


def make_run_id(folder: Path, start_utc: str, salt: str) -> str:
    """Make a readable, unique run id: name, start, six digits of a hash."""
    folder = folder.resolve()
    short = folder.name if len(folder.name) > 5 else f"{folder.parent.name}-{folder.name}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-.") or "run"
    stamp = re.sub(r"[-:]|\+.*", "", start_utc).replace("T", "-")
    return "-".join(filter(None, [name[:60], stamp, hashlib.sha256(salt.encode()).hexdigest()[:6]]))


def run_id(folder: Path) -> str:
    """Return the id of a run folder: the recorded one, or for an old folder one derived from name, config and start."""
    recorded = read_json(folder / PROVENANCE).get("run_id")
    if isinstance(recorded, str) and recorded:
        return recorded
    facts = [folder / name for name in ("config.yaml", "eval.json") if (folder / name).is_file()][:1]
    text = facts[0].read_text(encoding="utf-8", errors="replace") if facts else str(folder.resolve())
    start = str(read_json(folder / "environment.json").get("start_utc") or "")
    return make_run_id(folder, start, f"{text}\x00{start}")


def is_run(folder: Path, names: Iterable[str] | None = None) -> bool:
    """Say whether a folder is a run folder (names: its entries, if known)."""
    found = set(names) if names is not None else {path.name for path in folder.glob("*")}
    return bool(found & MARKS) or {"config.yaml", "environment.json"} <= found


def run_folders(root: Path) -> Iterator[Path]:
    """Yield every run folder below a folder, itself included, by path; checkpoints are not entered."""
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        if is_run(Path(place), files):
            yield Path(place)


def parent_run(source: str) -> Path | None:
    """Return the run folder of a model's path: run, run/checkpoints/step or the folder itself."""
    path = user_path(source)
    if not source or not os.path.exists(path):
        return None
    nearest = [path.resolve(), *path.resolve().parents][:3]
    return next((folder for folder in nearest if is_run(folder)), None)


RUNS = Path("runs")
"""Where runs are found by a short name."""
LATEST = "latest"
_STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?(?![^-])")


def short_name(folder: Path, root: Path = RUNS) -> str:
    """Return a run's short name: its path below the root, without times; runs/demo-DATE-TIME/rl is demo-rl."""
    return _STAMP.sub("", "-".join(folder.relative_to(root).parts))


def resolve_run(word: str, of_model: bool = False, root: Path = RUNS) -> str:
    """Return the run folder that a word names; a path that exists, or a word that names no run, unchanged.

    A run is named by its path (also below `runs`), its id, its short name (the newest of that name), a prefix of one of
    these that fits no other run, or `latest`.

    Args:
        word: What the user wrote.
        of_model: Whether it is a run with a model: one that has none, such as an evaluation, is not meant.
        root: Folder of the runs.

    Raises:
        UserError: If a prefix fits several runs.
    """
    if not word or os.path.isabs(word) or os.path.exists(user_path(word)) or not root.is_dir():
        return word
    if word in SHORT_MODELS:  # not a prefix of the runs and evaluations that are named after it
        return word
    is_path = word.startswith(f"{root}/")
    name = word.removeprefix(f"{root}/").rstrip("/")
    folders = [folder for folder in run_folders(root) if not of_model or _has_model(folder)]
    if name == LATEST:
        return str(max(folders, key=_started)) if folders else word
    names = {
        folder: (str(folder.relative_to(root)), short_name(folder, root), run_id(folder))
        for folder in folders
    }
    found = [folder for folder in folders if name in names[folder]]
    if not found and name and (is_path or "/" not in name):
        found = [folder for folder in folders if any(known.startswith(name) for known in names[folder])]
        outer = [folder for folder in found if not any(other in folder.parents for other in found)]
        found = outer if len(found) > 1 else found
    if len({names[folder][1] for folder in found}) > 1:
        some = ", ".join(dict.fromkeys(names[folder][1] for folder in found[:4]))
        raise UserError(
            f"{word!r} names {len(found)} runs: {some}; give more of the name (`whet runs` lists them)"
        )
    return str(max(found, key=_started)) if found else word


def _has_model(folder: Path) -> bool:
    """Say whether a run has checkpoints, or is a model's own folder."""
    return (folder / "checkpoints").is_dir() or any(
        (folder / name).is_file() for name in ("config.json", "adapter_config.json")
    )


def _started(folder: Path) -> float:
    """Return when a run began to be written, for the newest of several."""
    path = folder / "config.yaml"
    return path.stat().st_mtime if path.is_file() else 0.0


def no_run(word: str, *, or_hub: bool = False, root: Path = RUNS) -> UserError:
    """Return the error for a folder that is not there, with the runs whose names are near.

    Args:
        word: What the user wrote.
        or_hub: Whether a name of the hub would have done, too.
        root: Folder of the runs.
    """
    hub = ", and not a hub name such as 'owner/name'" if or_hub else ""
    known: dict[str, str] = {}
    for folder in run_folders(root) if root.is_dir() else ():
        known |= {short_name(folder, root): str(folder), str(folder): str(folder)}
    wanted = [word, _STAMP.sub("", word.removeprefix(f"{root}/").replace("/", "-"))]
    near = [known[match] for name in wanted for match in get_close_matches(name, known, n=2, cutoff=0.6)]
    near = get_close_matches(word, SHORT_MODELS, n=1, cutoff=0.8) + near if or_hub else near
    if not near and or_hub and "/" not in word:  # a model's folder lies beside
        near = get_close_matches(word, [path.name for path in Path().iterdir() if path.is_dir()], n=2)
    advice = f"near: {', '.join(dict.fromkeys(near))}; " if near else ""
    some = f"{advice}`whet runs` lists all" if known else "there are no runs yet: `whet demo` makes some"
    some = advice.removesuffix("; ") if near and not known else some
    if Path(word).is_file():
        return UserError(f"{word!r} is a file, expected a run or a folder ({some})")
    return UserError(f"{word!r}: no such run or folder{hub} ({some})")


def find_run(root: Path, name: str) -> Path:
    """Return the folder of a run by its id, a prefix of its id, or its path below `root`.

    Args:
        root: Folder of the runs.
        name: Run id, or a unique prefix of one.

    Raises:
        UserError: If there is none, or several.
    """
    ids = {folder: run_id(folder) for folder in run_folders(root)}
    found = [folder for folder, known in ids.items() if name == known]
    found = found or [folder for folder in ids if name in (str(folder), str(folder.relative_to(root)))]
    found = found or [folder for folder, known in ids.items() if name and known.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(f"{ids[folder]} ({folder})" for folder in found[:3])
        raise UserError(f"{name!r} names {len(found)} runs below {root}: {some}; give more of the id")
    raise UserError(f"{name!r}: no run of that id below {root} (`whet runs {root}` lists them)")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or contains no object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _weights_folder(source: str) -> Path | None:
    """Find the local folder of a model's files without network access."""
    path = user_path(source)
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return path.absolute()
    steps = sorted((path / "checkpoints").glob("step_*"), reverse=True)  # the order of whet.model.weights
    for candidate in [path / "checkpoints" / "best", *steps]:
        if (candidate / "config.json").is_file() or (candidate / "adapter_config.json").is_file():
            return candidate.absolute()
    cache = Path(os.environ.get("HF_HOME") or user_path("~/.cache/huggingface")) / "hub"
    cache = Path(os.environ.get("HF_HUB_CACHE") or cache) / f"models--{source.replace('/', '--')}"
    reference = cache / "refs" / "main"
    if not path.exists() and reference.is_file():
        folder = cache / "snapshots" / reference.read_text(encoding="ascii", errors="replace").strip()
        return folder if folder.is_dir() else None
    return None


def _digest(path: Path) -> str:
    facts = path.stat()
    return _read_digest(path, facts.st_size, facts.st_mtime_ns)


@cache
def _read_digest(path: Path, _size: int, _changed: int) -> str:
    """Hash a file once a process, while it stays as it is: a base is asked for as a model and as an input."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
