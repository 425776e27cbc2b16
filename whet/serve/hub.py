"""`whet push` and `whet pull`: a model and its card to the Hugging Face hub, a model from there, each file checked.

The card says what was measured and how: every number comes from the run's own files, with its interval.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from whet.cli import Program
from whet.config import read_yaml, user_path
from whet.install import install_command
from whet.model.files import check_manifest, is_hub_name
from whet.model.text.tokenizer import NAMED
from whet.model.weights import model_folder
from whet.report.runs import lineage, read_runs
from whet.telemetry.log import replace_file
from whet.telemetry.provenance import PUSHES, no_run, read_json, resolve_run, run_id
from whet.types import UserError

MODEL_FILES = (
    *(
        "config.json",
        "generation_config.json",
        "*.safetensors",
        "*.safetensors.index.json",
        "adapter_config.json",
    ),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
    ),
    *("vocab.json", "merges.txt", "*.jinja", "preprocessor_config.json", "protocol.json"),
)
"""Patterns of what is pushed and pulled: weights, tokenizer, configs; nothing that can run, nothing else."""
SECRET = re.compile(
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}"
    r"|xox[abpr]-[A-Za-z0-9-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s:@]+@"
)
"""Keys of the usual services, and passwords in addresses."""
TEXT_FILES = (".json", ".jsonl", ".yaml", ".md", ".txt", ".jinja")
CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Upload a run's model to the hub, with a card that is written from the run."""

    what: tuple[str, ...] = ()
    """Run folder (or model folder), and the repository: OWNER/NAME."""
    private: bool = False
    """Create the repository as a private one."""
    update: bool = False
    """Push to a repository that exists already."""
    evals: tuple[str, ...] = ()
    """Folders of evaluations for the card; empty for those below the run's parent folder that measured this run."""
    license: str = ""
    """Licence of the weights as the hub spells it, such as apache-2.0; empty leaves the field out."""
    samples: bool = False
    """Upload samples.jsonl, too: it holds prompts and completions."""
    optimizer: bool = False
    """Upload the checkpoint's training/ folder, too: the optimizer's state."""

    def __post_init__(self) -> None:
        if len(self.what) != 2:
            raise ValueError(
                f"got {len(self.what)} words, expected a run and a repository: whet push RUN OWNER/NAME"
            )


@dataclass(frozen=True, kw_only=True)
class PullConfig:
    """Download a model from the hub; each file is compared with the size and hash that the hub states."""

    name: str = ""
    """Repository: OWNER/NAME."""
    out: str = ""
    """New folder; empty for models/NAME."""
    revision: str = "main"
    """Branch, tag or commit."""


def push(config: PushConfig) -> None:
    """Create the repository, upload the files in one commit and print its address.

    Raises:
        UserError: If the run has no model, a file holds a secret, or the hub refuses.
    """
    files, card = prepare(config)
    hub, name = _hub(), config.what[1]
    print(_listing(files, card))
    try:
        hub.HfApi().create_repo(name, private=config.private, repo_type="model", exist_ok=config.update)
        operations = [hub.CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card.encode())]
        operations += [
            hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(file))
            for path, file in files.items()
        ]
        done = hub.HfApi().create_commit(name, operations, commit_message=f"{_title(config)}, pushed by whet")
    except Exception as error:  # of the hub, of its client, of the network
        raise _refused(name, error, "write") from error
    _record(user_path(resolve_run(config.what[0])), name, done)
    print(f"{done.commit_url}\nload it: whet pull {name} --revision {done.oid}, or --policy.init {name}")


def _record(run: Path, name: str, done: Any) -> None:
    """Note in a run's folder which commit it became, for the registry: the hub's own word, not what is newest there."""
    if not (run / "config.yaml").is_file():
        return
    known = read_json(run / PUSHES).get("pushes")
    row = {"name": name, "id": done.oid, "url": done.commit_url}
    try:
        replace_file(run / PUSHES, json.dumps({"pushes": [*(known or []), row]}, indent=1) + "\n")
    except OSError as error:
        text = f"the commit could not be noted in {run} ({error.strerror}); the registry will not know it"
        print(f"whet: warning: {text}", file=sys.stderr, flush=True)


def pull(config: PullConfig) -> None:
    """Download the model's files into a new folder and print how to use it.

    Raises:
        UserError: If the hub does not know the model, it holds no safetensors, or a file differs from what was stated.
    """
    if "/" not in config.name or not is_hub_name(config.name):
        raise UserError(
            f"which model? got {config.name!r}, expected OWNER/NAME, as in: whet pull Qwen/Qwen3-0.6B"
        )
    out = Path(config.out or Path("models") / config.name.rpartition("/")[2])
    if out.exists():
        raise UserError(f"{out}: exists already; name another folder with --out")
    hub = _hub()
    try:
        info = hub.HfApi().model_info(config.name, revision=config.revision, files_metadata=True)
    except Exception as error:  # of the hub, of its client, of the network
        raise _refused(config.name, error, "read", config.revision) from error
    stated = {file.rfilename: file for file in info.siblings or [] if _is_wanted(file.rfilename)}
    if not any(name.endswith(".safetensors") for name in stated):
        raise UserError(f"{config.name}: no safetensors in it; whet loads no other weights")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as part:
        try:
            hub.snapshot_download(
                config.name, revision=info.sha, allow_patterns=list(stated), local_dir=part, etag_timeout=10
            )
        except Exception as error:  # of the hub, of its client, of the network
            raise _refused(config.name, error, "read", config.revision) from error
        shutil.rmtree(Path(part) / ".cache", ignore_errors=True)
        for name, file in stated.items():
            _check_file(config.name, Path(part) / name, file)
        os.chmod(part, 0o755)  # a temporary folder is its owner's alone
        shutil.copytree(part, out)
    print(
        f"{out}: {config.name} at commit {info.sha}, {len(stated)} files checked\nuse it: --policy.init {out}"
    )


def prepare(config: PushConfig) -> tuple[dict[str, Path], str]:
    """Choose the files and write the card; touches no network.

    Returns:
        Local file by its path in the repository, and the text of the card.

    Raises:
        UserError: If the run has no model, the name is none, or a file holds a secret.
    """
    source, name = config.what
    if "/" not in name or not is_hub_name(name):
        raise UserError(f"repository {name!r}: expected OWNER/NAME, as in: whet push {source} me/my-model")
    run = user_path(resolve_run(source))
    if not run.is_dir():
        raise no_run(str(source))
    folder = run if (run / "adapter_config.json").is_file() else model_folder(run)
    check_manifest(folder)
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {name: path for name, path in paths.items() if _is_wanted(name)}
    if not any(path.endswith(".safetensors") for path in files):
        raise UserError(f"{folder}: no safetensors in it, so there is no model to push")
    if config.optimizer:
        state = sorted(path for path in (folder / "training").rglob("*") if path.is_file())
        if not state:
            raise UserError(f"{folder}: no training/ in it, so --optimizer has nothing to upload")
        files |= {str(path.relative_to(folder)): path for path in state}
    if (run / "config.yaml").is_file():
        files["whet_config.yaml"] = run / "config.yaml"
    if config.samples:
        if not (run / "samples.jsonl").is_file():
            raise UserError(f"{run}: no samples.jsonl in it, so --samples has nothing to upload")
        files["samples.jsonl"] = run / "samples.jsonl"
    card = write_card(config, run)
    for path, text in _texts(files, card):
        if found := SECRET.search(text):
            hint = "in the run's command or config" if path == CARD else "in the file"
            raise UserError(
                f"{path}: looks like it holds a secret ({found.group()[:6]}...); remove it {hint}"
            )
    return files, card


def write_card(config: PushConfig, run: Path) -> str:
    """Write the model card: YAML front matter as the hub reads it, then what was trained on what, and the results.

    Args:
        config: The push.
        run: The run folder.
    """
    root = run.resolve().parent
    runs = read_runs(root)
    own = next((row for row in runs if (root / row["folder"]).resolve() == run.resolve()), None)
    settings = read_yaml(run / "config.yaml") if own and (run / "config.yaml").is_file() else {}
    ancestors = lineage(own, runs) if own else []
    base = next(
        (name for name in ancestors if "/" in name and is_hub_name(name) and not (Path(name)).exists()), ""
    )
    task = settings.get("task")
    task = task if isinstance(task, dict) else {"name": str(task or "")}
    data = str(task.get("path") or "")
    results = _measured(config, run, runs, root)
    earlier = [
        row for row in runs if row["scores"] and row["parent"] and row["parent"]["known"] in ancestors[:-1]
    ]
    kind = own["kind"] if own else ""
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["whet", *([kind] if kind else []), "reasoning"]
    if config.license:
        head["license"] = config.license
    if base:
        head["base_model"] = base
    if "/" in data and is_hub_name(data) and not Path(data).exists():
        head["datasets"] = [data]
    if results:
        head["model-index"] = [
            {"name": config.what[1].rpartition("/")[2], "results": [_index_entry(row) for row in results]}
        ]
    environment = read_json(run / "environment.json")
    argv = [str(word) for word in environment.get("argv") or []]
    facts = {
        "Base": " → ".join(_public(name) for name in ancestors[:-1]) or base,
        "Algorithm": kind,
        "Data": f"{task.get('name', '')} {data if 'datasets' in head else ''}".strip(),
        "Command": f"`{shlex.join(['whet', *map(_public, argv[1:])])}`" if len(argv) > 1 else "",
        "Code": " ".join(filter(None, [f"whet {own['whet']}" if own and own["whet"] else "", _short(own)])),
        "Run": run_id(run) if own else "",
        "Licence": config.license or "not stated; that of the base model and of the data applies",
    }
    table = [
        "| model | task | split | problems | samples | pass@1 (95 % interval) | greedy (95 % interval) |",
        "|---|---|---|---|---|---|---|",
        *(_table_row(row["parent"]["known"], row) for row in earlier),
        *(_table_row("this one", row) for row in results),
    ]
    algo = settings.get("algo")
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n# {config.what[1]}\n",
        "\n".join(f"- **{name}**: {value}" for name, value in facts.items() if value) + "\n",
        "## Results\n",
        "\n".join(table) + "\n" if results else "Nothing was measured.\n",
    ]
    if isinstance(algo, dict):
        parts.append(f"## Settings of the algorithm\n\n```yaml\n{yaml.safe_dump(algo, sort_keys=False)}```\n")
    return "\n".join(parts)


def _measured(
    config: PushConfig, run: Path, runs: Sequence[Mapping[str, Any]], root: Path
) -> list[Mapping[str, Any]]:
    """Return the evaluations of the run, one row each: those that are named, or those that name the run as parent."""
    if config.evals:
        rows = []
        for folder in config.evals:
            found = [row for row in read_runs(Path(folder)) if row["folder"] == "." and row["scores"]]
            if not found:
                raise UserError(f"{folder}: no finished evaluation; expected a folder that `whet eval` wrote")
            rows += found
        return rows
    return [
        row
        for row in runs
        if row["scores"] and row["parent"] and Path(row["parent"]["folder"]).resolve() == run.resolve()
    ]


def _index_entry(row: Mapping[str, Any]) -> dict[str, Any]:
    metrics = [
        {
            "type": name,
            "name": f"{name}, 95 % interval {100 * score['low']:.1f} to {100 * score['high']:.1f}",
            "value": round(100 * score["mean"], 2),
        }
        for name in ("pass@1", "greedy")
        if (score := row["scores"][name])
    ]
    data = {
        "type": row["task"] or "unknown",
        "name": row["task"] or "unknown",
        "split": row["split"] or "test",
    }
    return {"task": {"type": "text-generation"}, "dataset": data, "metrics": metrics}


def _table_row(model: str, row: Mapping[str, Any]) -> str:
    def interval(name: str) -> str:
        score = row["scores"][name]
        return f"{100 * score['mean']:.1f} % ({100 * score['low']:.1f} to {100 * score['high']:.1f})"

    counts = (str(row["scores"][name] or "") for name in ("num_problems", "num_samples"))
    cells = [model, row["task"], row["split"], *counts, interval("pass@1"), interval("greedy")]
    return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"


def _public(word: str) -> str:
    """Shorten an absolute path to its last part: a card needs nobody's folders."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if value.startswith(("/", "~")) else word


def _short(own: Mapping[str, Any] | None) -> str:
    commit = own["git_commit"] if own else None
    return f"at {commit[:12]}" if commit else ""


def _title(config: PushConfig) -> str:
    return Path(config.what[0]).name or "model"


def _is_wanted(name: str) -> bool:
    parent, _, base = name.rpartition("/")
    return parent in ("", NAMED) and any(fnmatch(base, pattern) for pattern in MODEL_FILES)


def _texts(files: Mapping[str, Path], card: str) -> list[tuple[str, str]]:
    return [
        (CARD, card),
        *(
            (path, file.read_text(encoding="utf-8", errors="replace"))
            for path, file in files.items()
            if file.suffix in TEXT_FILES
        ),
    ]


def _listing(files: Mapping[str, Path], card: str) -> str:
    sizes = {CARD: len(card.encode())} | {path: file.stat().st_size for path, file in files.items()}
    rows = [f"{size:>16,}  {path}" for path, size in sizes.items()]
    return "\n".join([*rows, f"{sum(sizes.values()):>16,}  bytes in {len(sizes)} files"])


def plan(config: PushConfig) -> str:
    """Return the card and the files with their sizes, for --dry-run."""
    files, card = prepare(config)
    return f"{card}\n{_listing(files, card)}"


def _check_file(name: str, path: Path, stated: Any) -> None:
    """Compare a downloaded file with the size and hash that the hub states: sha256 of large files, git's of others."""
    if not path.is_file():
        raise UserError(f"{name}: {path.name} did not arrive; try again")
    digest = hashlib.sha256() if stated.lfs else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    expected = stated.lfs.sha256 if stated.lfs else stated.blob_id
    size = stated.lfs.size if stated.lfs else stated.size
    if path.stat().st_size != size or digest.hexdigest() != expected:
        raise UserError(
            f"{name}: {path.name} has {path.stat().st_size:,} bytes and hash {digest.hexdigest()[:12]}, the hub states "
            f"{size or 0:,} and {str(expected)[:12]}; nothing was kept, try again"
        )


def _hub() -> Any:
    """Import the hub's client; it is in every installation that can read hub names, but a bare one lacks it."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"push and pull need the hub's client: {install_command('hf')}") from None
    return huggingface_hub


def _refused(name: str, error: Exception, right: str, revision: str = "") -> UserError:
    """Say in one line what the hub refused and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    if type(error).__name__ == "RevisionNotFoundError":
        return UserError(f"{name}: no revision {revision!r} on the hub; see its branches and commits there")
    remedies = {
        401: f"the hub knows no such model, or asks for a token: `hf auth login`, or HF_TOKEN with {right} access",
        403: f"the token may not {right} there: make one with {right} access, or push under your own name",
        404: "the hub knows no such model; check the name",
        409: "the repository exists already: --update pushes to it, or choose another name",
        413: "the hub takes no file this large",
    }
    if status in remedies:
        return UserError(f"{name}: {remedies[status]} ({status})")
    if type(error).__name__ == "LocalTokenNotFoundError":
        return UserError(f"{name}: {remedies[401]}")
    return UserError(f"{name}: the hub refused or cannot be reached ({reason})")


PUSH = Program(config_class=PushConfig, main=push, positional="what", plan=plan)
PULL = Program(config_class=PullConfig, main=pull, positional="name")
